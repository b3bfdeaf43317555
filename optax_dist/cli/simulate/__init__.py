"""``optax-dist simulate``, ``plan`` and ``replay``."""
