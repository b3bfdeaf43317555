"""Tools for states: specs for maps, reading, resizing and placing them."""
