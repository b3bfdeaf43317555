"""``optax-dist watch``: what a journal says about a run."""
