"""Shared code of the transforms; nothing here is public."""
