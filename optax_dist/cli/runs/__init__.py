"""``optax-dist watch``: shows a run from its journal."""
