"""Sharded checkpoints and exports."""
