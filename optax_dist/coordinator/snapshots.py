"""A peer's state for one who has just joined, or fell too far behind."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optax_dist.coordinator import engine, messages
from optax_dist.coordinator.aggregation import layout, means
from optax_dist.coordinator.fingerprint import as_numpy

_KEPT = 2


class Snapshots:
  """Serves and fetches whole states; arrays never change, so it is a copy."""

  def __init__(self, engine_: engine.Engine, secret: bytes):
    self._engine = engine_
    self._secret = secret
    self._served: collections.deque[np.ndarray] = collections.deque()

  def serve(
    self, state: Any, step: int, position: int, to: int, address: str
  ) -> None:
    """Offers a state to a replica (its incarnation and address)."""
    leaves = [as_numpy(leaf) for leaf in jax.tree.leaves(state)]
    place = layout.layout(leaves)
    buffer = self._engine.exchange.buffer(place.nbytes)
    means.write(leaves, place, buffer)
    number = messages.ticket(self._secret, "snapshot", position, to)
    self._engine.exchange.offer(number, buffer, [address])
    key = _key(position, to)
    header = {"kind": "snapshot", "step": step, "nbytes": place.nbytes}
    self._engine.board.put(key, messages.pack(self._secret, key, header))
    self._served.append(buffer)
    while len(self._served) > _KEPT:
      self._engine.exchange.recycle(self._served.popleft())

  def fetch(
    self,
    like: Any,
    position: int,
    me: int,
    address: str,
    timeout: float,
    cancelled: Callable[[], bool],
  ) -> tuple[Any, int]:
    """The state that a peer serves, and its step.

    Args:
      like: a state of the same structure, shapes and dtypes.
      position: of the log entry that asked the peer to serve.
      me: the own incarnation.
      address: the peer's.
      timeout: seconds to wait at most.
      cancelled: see `Exchange.fetch`.

    Raises:
      EngineTimeout, PeerLost, OfferGone: it did not come.
      BadMessage: it is not such a state.
    """
    key = _key(position, me)
    blob = self._engine.board.get(key, timeout)
    header, _ = messages.unpack(self._secret, key, blob)
    self._engine.board.delete(key)
    leaves, tree = jax.tree.flatten(like)
    place = layout.layout([as_numpy(leaf) for leaf in leaves])
    if header["nbytes"] != place.nbytes:
      raise messages.BadMessage(
        f"a snapshot of {header['nbytes']:,} bytes, not {place.nbytes:,}"
      )
    number = messages.ticket(self._secret, "snapshot", position, me)
    got = self._engine.exchange.fetch(
      address, number, place.nbytes, timeout, cancelled
    )
    own = np.array(got.array)
    got.check()
    scratch = np.empty(0, np.uint8)
    arrays = means.read(place, [own], (0, place.elements), scratch)
    found = [_like(a, leaf) for a, leaf in zip(arrays, leaves, strict=True)]
    return jax.tree.unflatten(tree, found), header["step"]


def _like(array: np.ndarray, leaf: Any) -> Any:
  """An array as the same kind of leaf: on the same devices, a key as a key."""
  if not isinstance(leaf, jax.Array):
    return array.copy()
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    implementation = jax.random.key_impl(leaf)
    key = jax.random.wrap_key_data(jax.numpy.array(array), impl=implementation)
    return jax.device_put(key, leaf.sharding)
  # A copy: what jax may take for its own must not be a view. Committed to a
  # device only if the leaf is: programs would be compiled anew for it.
  where = leaf.sharding if leaf.committed else None
  return jax.device_put(array.copy(), where)


def _key(position: int, to: int) -> str:
  return f"snapshot/{position}/{to}"
