"""Launches a job over several hosts: see `placement`."""
