"""The coordinator: members, gradients and rounds in, decisions out."""
