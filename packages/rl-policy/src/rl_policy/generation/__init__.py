"""Inference engines over Ray: what all of them share here, each kind in a folder of its own."""
