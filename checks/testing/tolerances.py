"""How far two results may be apart, from the arithmetic that made them: one table for all tests."""
