"""Which parts of a state belong to one replica, and where they are on a mesh."""
