"""What lets Megatron-core run on the CPU, and mends of it."""
