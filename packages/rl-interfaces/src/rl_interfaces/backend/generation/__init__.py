"""The loop of batched generation, and the sampling of tokens."""
