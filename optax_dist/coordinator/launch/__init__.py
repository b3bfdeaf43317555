"""Starts and supervises a job's replicas on this host: see `launcher`."""
