"""Packing of sequences into bins, and the token layout of packed sequences."""
