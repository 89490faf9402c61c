"""Parallel layout, process groups and pipeline schedules."""
