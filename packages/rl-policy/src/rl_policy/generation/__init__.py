"""Inference engines over Ray: each kind in a folder of its own, and in `state` what all share."""
