"""Megatron-core models: built, loaded, and what scores their tokens."""
