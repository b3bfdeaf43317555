"""The coordinator's process: its log, its event loop, and how it is started.

It imports neither JAX nor any module that does, so that it starts quickly.
"""
