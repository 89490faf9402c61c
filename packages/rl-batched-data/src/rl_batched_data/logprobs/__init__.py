"""Log-probabilities of tokens under vocabulary-sharded logits."""
