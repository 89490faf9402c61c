"""Packed layout and attention, with or without a key-value cache."""
