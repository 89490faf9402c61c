"""Checkpoints on disk, complete or absent."""
