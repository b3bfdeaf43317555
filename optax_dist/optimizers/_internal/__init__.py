"""What the update rules share; nothing here is public."""
