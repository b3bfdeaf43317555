"""``optax-dist train``."""
