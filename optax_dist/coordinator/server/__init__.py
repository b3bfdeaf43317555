"""The coordinator's process: its log, its event loop, and how it is started.

It imports neither JAX nor what imports it, so that it is there at once.
"""
