"""The replicated key-value store: what must be decided once is put there."""
