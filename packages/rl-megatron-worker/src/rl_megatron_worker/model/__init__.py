"""Megatron-core models: config, construction, loading and output head."""
