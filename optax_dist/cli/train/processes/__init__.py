"""``optax-dist train --launch processes``."""
