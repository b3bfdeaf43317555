"""The coordinator's protocol: two state machines, and nothing else.

No jax, no arrays, no threads, clocks, sockets or logging. `inputs` are what
happens to a replica, `effects` what its driver is to do; `messages` go between
replicas, and `entries` are what the store decides.
"""
