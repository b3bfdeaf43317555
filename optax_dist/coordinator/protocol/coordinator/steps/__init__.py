"""The steps of a run: gradients in, decisions out."""
