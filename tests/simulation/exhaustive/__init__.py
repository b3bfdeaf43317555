"""Small runs, of which every order of events is followed."""
