"""Commands of `rl-policy` that carry out no recipe."""
