"""Attention over packed sequences, with a cache or without."""
