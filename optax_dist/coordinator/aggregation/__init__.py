"""Gradients as bytes: layout, wire formats, and averaging."""
