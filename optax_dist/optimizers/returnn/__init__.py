"""RETURNN's configurations: its optimizers, gradient settings, learning rates."""
