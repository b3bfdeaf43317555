"""The replicated key-value store, for what must be decided exactly once."""
