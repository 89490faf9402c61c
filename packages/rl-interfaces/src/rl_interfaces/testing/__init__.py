"""The conformance kit: checks by which a backend proves that it keeps the contracts."""
