"""A long run of the main job, with kills and without: nothing grows, nothing is left or differs."""
