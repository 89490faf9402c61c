"""A typed batch of tensors and lists."""
