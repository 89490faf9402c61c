"""The configuration of a policy: its keys, their defaults, its schema."""
