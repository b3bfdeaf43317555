"""Reads a journal: its latencies, and its run for replay."""
