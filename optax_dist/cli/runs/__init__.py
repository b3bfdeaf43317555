"""``optax-dist watch``: what a journal tells of a run."""
