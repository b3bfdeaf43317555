"""The board on a client of JAX's distributed runtime."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.errors

from optax_dist.coordinator import engine

# Python handles Ctrl-C only between two waits.
_SLICE = 0.5
# For calls of other threads to end when the board is closed.
_LAST_SECONDS = 2.0


class RuntimeBoard:
  """The service's key-value store; see `engine.Board`."""

  def __init__(self, client: Any, address: str):
    self._client = client
    self._address = address
    self._closed = threading.Event()
    self._calls = 0
    self._calls_changed = threading.Condition()
    # A client that is connected when the service ends, ends this process.
    atexit.register(self.close)

  def put(self, key: str, value: bytes, *, overwrite: bool = False) -> bool:
    _check_key(key)
    try:
      with self._errors("put", key):
        self._client.key_value_set_bytes(
          key, bytes(value), allow_overwrite=overwrite
        )
    except _KeyExists:
      return False
    return True

  def get(self, key: str, timeout: float) -> bytes:
    _check_key(key)
    deadline = time.monotonic() + timeout
    while True:
      left = max(0.0, deadline - time.monotonic())
      try:
        with self._errors("get", key):
          return self._client.blocking_key_value_get_bytes(
            key, max(1, round(1000 * min(left, _SLICE)))
          )
      except _NotYet:
        if time.monotonic() >= deadline:
          raise engine.EngineTimeout(
            f"Nothing was put under {key!r} within {timeout:g} s."
          ) from None

  def try_get(self, key: str) -> bytes | None:
    _check_key(key)
    try:
      with self._errors("get", key):
        return self._client.key_value_try_get_bytes(key)
    except _NoKey:
      return None

  def items(self, prefix: str) -> dict[str, bytes]:
    _check_key(prefix)
    with self._errors("list", prefix):
      pairs = self._client.key_value_dir_get_bytes(prefix)
    return {k: v for k, v in pairs if k.startswith(prefix + "/")}

  def delete(self, key: str) -> None:
    _check_key(key)
    with self._errors("delete", key):
      self._client.key_value_delete(key)

  def close(self) -> None:
    with self._calls_changed:
      if self._closed.is_set():
        return
      self._closed.set()
    atexit.unregister(self.close)
    # Ends the waits of other threads, too. From now on JAX doesn't end this
    # process when the service ends.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._client.shutdown()
    # A thread that is in a call of JAX's while Python ends, aborts the process.
    with self._calls_changed:
      self._calls_changed.wait_for(lambda: not self._calls, _LAST_SECONDS)

  @contextlib.contextmanager
  def _errors(self, verb: str, key: str) -> Iterator[None]:
    with self._calls_changed:
      if self._closed.is_set():
        raise engine.BoardLost("The board has been closed.")
      self._calls += 1
    try:
      yield
    except jax.errors.JaxRuntimeError as error:
      if self._closed.is_set():
        raise engine.BoardLost("The board has been closed.") from None
      code = str(error).partition(":")[0]
      if code in ("ALREADY_EXISTS", "NOT_FOUND"):
        raise (_KeyExists if code == "ALREADY_EXISTS" else _NoKey) from None
      if code == "DEADLINE_EXCEEDED" and "GetKeyValue()" in str(error):
        raise _NotYet from None
      raise engine.BoardLost(
        f"Can't {verb} {key!r}: the coordination service at {self._address}"
        f" can't be reached ({str(error).splitlines()[0]})."
      ) from error
    finally:
      with self._calls_changed:
        self._calls -= 1
        self._calls_changed.notify_all()


class _KeyExists(Exception):
  """The key has a value."""


class _NoKey(Exception):
  """The key has no value."""


class _NotYet(Exception):
  """The key got no value during one wait."""


def _check_key(key: str) -> None:
  # The service takes //a/ and a for the same; a board does not have to.
  if not key or not all(key.split("/")):
    raise ValueError(
      f"A key is a path such as log/17, with no empty part; got {key!r}."
    )
