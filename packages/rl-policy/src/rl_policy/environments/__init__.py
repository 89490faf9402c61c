"""Episodes of several turns: users' environments in processes, rollouts, and two examples."""
