"""Optional parts of the coordinator: each imports the core, which knows none."""
