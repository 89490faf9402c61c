"""Hugging Face models in Megatron-core's terms, by `model_type`."""
