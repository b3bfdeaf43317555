"""``optax-dist simulate`` and ``plan``."""
