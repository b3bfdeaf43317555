"""The driver: brings inputs to the protocol core, and carries its effects out."""
