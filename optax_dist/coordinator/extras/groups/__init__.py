"""Replicas of several processes: one JAX program that is one replica."""
