"""Simulates the coordinator's protocol: see `world`."""
