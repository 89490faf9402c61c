"""Full weights for inference engines and exports."""
