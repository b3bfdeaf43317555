"""Several runs on one board: each has keys and a secret of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

from optax_dist.coordinator import engine, options


class NamedBoard:
  """A board whose keys stand under the name of a run; see `engine.Board`."""

  def __init__(self, board: engine.Board, name: str):
    self._board = board
    # A digest, for a name may have any characters.
    self._start = hashlib.sha256(name.encode()).hexdigest()[:16] + "/"

  def put(self, key: str, value: bytes, *, overwrite: bool = False) -> bool:
    return self._board.put(self._start + key, value, overwrite=overwrite)

  def get(self, key: str, timeout: float) -> bytes:
    return self._board.get(self._start + key, timeout)

  def try_get(self, key: str) -> bytes | None:
    return self._board.try_get(self._start + key)

  def items(self, prefix: str) -> dict[str, bytes]:
    found = self._board.items(self._start + prefix)
    return {key.removeprefix(self._start): v for key, v in found.items()}

  def delete(self, key: str) -> None:
    self._board.delete(self._start + key)

  def close(self) -> None:
    self._board.close()


def named(
  engine_: engine.Engine, settings: options.Options
) -> tuple[engine.Engine, options.Options]:
  """The engine and options by which a replica meets those of its run alone.

  The secret is the run's own, so no message of one can be passed off as
  another's, nor a ticket be guessed.
  """
  if not settings.run:
    return engine_, settings
  secret = hmac.digest(settings.secret, settings.run.encode(), "sha256")
  board = NamedBoard(engine_.board, settings.run)
  return (
    dataclasses.replace(engine_, board=board),
    dataclasses.replace(settings, secret=secret),
  )
