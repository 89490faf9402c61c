"""Inference engines over Ray, found by name. Importing this imports none of them."""
