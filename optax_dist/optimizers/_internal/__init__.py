"""Shared code of the update rules; nothing here is public."""
