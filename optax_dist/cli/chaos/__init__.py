"""``optax-dist chaos``: faults in every phase of a step."""
