"""Training recipes over a `Policy`: supervised fine-tuning and GRPO, with what they need."""
