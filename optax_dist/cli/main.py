"""Entry point of the ``optax-dist`` command."""
