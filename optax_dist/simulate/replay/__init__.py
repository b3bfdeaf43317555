"""Reading a journal: its latencies, and its run once more."""
