"""Runs `optax-dist` as a process of its own."""

import contextlib
import os
import pathlib
import subprocess
import sys

from optax_dist.coordinator.server import process

SECRET = "a secret of enough bytes"


@contextlib.contextmanager
def starting(folder: pathlib.Path):
  """Starts commands in a folder, with what each prints in a file; kills them."""
  made = []

  def begin(*arguments, **variables):
    log = folder / f"printed-{len(made)}"
    environment = {
      name: value
      for name, value in os.environ.items()
      if not name.startswith("OPTAX_DIST_")
    }
    environment |= {"JAX_PLATFORMS": "cpu", "OPTAX_DIST_SECRET": SECRET}
    with log.open("wb") as out:
      made.append(
        subprocess.Popen(
          [sys.executable, "-m", "optax_dist", *map(str, arguments)],
          stdout=out,
          stderr=subprocess.STDOUT,
          # An encrypted key would prompt for its pass phrase.
          stdin=subprocess.DEVNULL,
          env=environment | variables,
          cwd=folder,
        )
      )
    return made[-1], log.read_text

  try:
    yield begin
  finally:
    for one in made:
      one.kill()
      one.wait()


def refused_by_etcd(url: str, secret: str = SECRET) -> str:
  """Returns the error of a coordinator that cannot have the lease, and ends at once."""
  notified = {process.STORE_VARIABLE: url, process.SECRET_VARIABLE: secret}
  ended = subprocess.run(
    [sys.executable, "-m", "optax_dist", "coordinator"],
    env=os.environ | notified,
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )
  assert ended.returncode == 1
  return ended.stderr
