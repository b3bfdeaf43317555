"""``optax-dist launch``."""
