"""What the rooms of the coordinator share; nothing here is public."""
