"""Tests of the strategies; a package, so that names may repeat."""
