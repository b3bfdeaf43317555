"""The ``optax-dist`` command.

JAX and other slow modules are imported inside functions, or by modules that
are: help and errors must appear immediately.
"""
