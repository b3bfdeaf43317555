"""Sparse gradients."""
