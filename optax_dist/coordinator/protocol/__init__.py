"""The coordinator's protocol: two state machines, and nothing else.

No jax, no arrays, no threads, clocks, sockets or logging. `inputs` are the
events of a process, `effects` the actions for its driver; `messages` are sent
between replicas and the coordinator, and `entries` are in its log.
"""
