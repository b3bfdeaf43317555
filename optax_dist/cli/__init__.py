"""The ``optax-dist`` command.

Its modules import JAX, and all else that is slow to import, inside functions or
are themselves imported inside functions: help and errors must come at once.
"""
