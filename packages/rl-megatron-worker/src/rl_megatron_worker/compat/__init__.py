"""What lets Megatron-core run on the CPU and without Transformer Engine."""
