"""What is done with the leaves of a tree: side by side, packed, in place."""
