"""Metrics of a run in progress, and their exporters."""
