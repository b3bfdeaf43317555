"""Faults in real processes: ``python -m tests.chaos --seeds 0:50``."""
