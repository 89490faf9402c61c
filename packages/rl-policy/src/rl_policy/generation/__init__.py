"""Inference engines over Ray: a folder for each kind, and `state`, which all of them share."""
