"""Mutation testing of the pure rooms, by hand or nightly."""
