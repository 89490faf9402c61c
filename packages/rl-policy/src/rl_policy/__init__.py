"""The policy over Ray."""
