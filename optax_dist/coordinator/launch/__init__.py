"""Starts a job's replicas on this host, and minds them: see `launcher`."""
