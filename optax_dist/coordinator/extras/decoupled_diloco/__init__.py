"""Decoupled DiLoCo, learners that never wait for each other: see `strategy`."""
