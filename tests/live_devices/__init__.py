"""What `live_devices` of JAX and the coordinator do when processes fail."""
