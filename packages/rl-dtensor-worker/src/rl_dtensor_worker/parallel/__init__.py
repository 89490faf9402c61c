"""Meshes of ranks, and how a model is sharded over them."""
