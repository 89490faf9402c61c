"""Groups of ranks, and the pipeline's schedules."""
