"""The driver: feeds inputs to the protocol core, and executes its effects."""
