"""Packing of sequences into bins, and where the tokens of packed sequences lie."""
