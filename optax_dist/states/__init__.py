"""What one does with a state: carry it through a map, read it, move it."""
