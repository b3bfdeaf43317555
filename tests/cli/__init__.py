"""Tests of the command; a package, so that names may repeat."""
