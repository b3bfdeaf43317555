"""Helpers that the packages of the coordinator share; nothing here is public."""
