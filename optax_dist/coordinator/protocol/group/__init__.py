"""Replicas of several processes: process 0 speaks, the others follow."""
