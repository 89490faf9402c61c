"""Ranks, devices, ports and random state of one process of a job."""
