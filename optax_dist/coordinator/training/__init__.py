"""A replica as its training loop sees it: what it submits, and how it waits."""
