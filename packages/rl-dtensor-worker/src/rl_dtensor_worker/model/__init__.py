"""Models of transformers: building, loading, and adapters."""
