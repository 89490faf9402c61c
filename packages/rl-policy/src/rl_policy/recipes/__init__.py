"""Training recipes: GRPO, supervised fine-tuning, preferences (DPO), and others by entry point."""
