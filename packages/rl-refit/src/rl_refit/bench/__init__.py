"""A command that measures a refit on machines of one's own: `python -m rl_refit.bench`."""
