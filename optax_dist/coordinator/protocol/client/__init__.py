"""A replica: what it submits and applies, and its connection to the coordinator."""
