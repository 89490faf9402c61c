"""A run while it goes on: its inputs, devices, loop, measurements, checkpoints and files."""
