"""Sharding of a batch over ranks, and its micro-batches: fixed, dynamic, packed."""
