"""The transforms to chain: gradients in, updates out."""
