"""Closes the transports of each test."""

import near_transports
import pytest


@pytest.fixture(autouse=True)
def _no_transport_outlives_its_test():
  yield
  near_transports.close_all()
