"""Attention over packed sequences and over sequences sharded among ranks."""
