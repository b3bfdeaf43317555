"""``optax-dist watch --web``: a run on one page in a browser."""
