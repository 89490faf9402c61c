"""What the recipes of the policy gradient share: sampled groups, their advantages, and a step."""
