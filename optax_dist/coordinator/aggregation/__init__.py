"""Gradients as bytes: how they lie, travel and are averaged."""
