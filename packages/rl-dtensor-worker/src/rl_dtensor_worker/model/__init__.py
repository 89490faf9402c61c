"""Models of transformers: built, loaded, and what scores their tokens."""
