"""What recipes train on: problems, preference pairs, their batches and rewards, the tiny model."""
