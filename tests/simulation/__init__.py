"""The coordinator's protocol in a world of its own: see `world`."""
