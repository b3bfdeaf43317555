"""Worlds of transports of each kind."""

import time

import pytest

from tests.coordinator.transport import worlds

KINDS = ("unix", "tcp", "tls")


@pytest.fixture(scope="session")
def certificate_folder(tmp_path_factory):
  return tmp_path_factory.mktemp("certificates")


@pytest.fixture(params=KINDS)
def world(request, certificate_folder):
  """A world of each kind in turn."""
  made = worlds.World(request.param, certificate_folder)
  yield made
  made.close()


@pytest.fixture
def new_world(certificate_folder):
  """Makes worlds, and closes them whatever happens."""
  made = []

  def make(kind, folder=certificate_folder, limits=None, clock=time.monotonic):
    made.append(worlds.World(kind, folder, limits, clock))
    return made[-1]

  yield make
  for one in made:
    one.close()
