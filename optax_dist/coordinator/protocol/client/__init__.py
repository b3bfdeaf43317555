"""A replica: what it submits, applies and reads, and how it finds the leader."""
