"""How a client's errors are told; what a board does is in test_engine."""

import types

import jax.errors
import pytest

from optax_dist.coordinator import engine, runtime_board


def _board(message, calls=None):
  """A board whose service answers everything with an error."""

  def fails(*_, **__):
    if calls is not None:
      calls.append(message)
    raise jax.errors.JaxRuntimeError(message)

  client = types.SimpleNamespace(
    key_value_set_bytes=fails,
    blocking_key_value_get_bytes=fails,
    key_value_try_get_bytes=fails,
    key_value_dir_get_bytes=fails,
    key_value_delete=fails,
    shutdown=fails,
  )
  return runtime_board.RuntimeBoard(client, "h:1")


_CALLS = [
  lambda board: board.put("a", b""),
  lambda board: board.get("a", 0.01),
  lambda board: board.try_get("a"),
  lambda board: board.items("a"),
  lambda board: board.delete("a"),
]


@pytest.mark.parametrize("call", _CALLS)
def test_a_service_that_is_gone(call):
  for message in ("UNAVAILABLE: refused\nmore", "DEADLINE_EXCEEDED: an RPC"):
    board = _board(message)
    with pytest.raises(engine.BoardLost, match=r"'a'.*h:1") as error:
      call(board)
    assert message.splitlines()[0] in str(error.value)
    assert "more" not in str(error.value)
    board.close()
    with pytest.raises(engine.BoardLost, match="closed"):
      call(board)
    board.close()


def test_answers_that_are_no_failure():
  board = _board("ALREADY_EXISTS: key a")
  assert not board.put("a", b"")
  board.close()
  board = _board("NOT_FOUND: key a")
  assert board.try_get("a") is None
  board.close()
  calls = []
  board = _board("DEADLINE_EXCEEDED: GetKeyValue() timed out", calls)
  with pytest.raises(engine.EngineTimeout, match=r"'a' within 0\.01 s"):
    board.get("a", 0.01)
  assert calls
  board.close()


def test_a_wait_that_close_ends():
  def closes(*_):
    board.close()
    raise jax.errors.JaxRuntimeError("CANCELLED: CANCELLED")

  client = types.SimpleNamespace(
    blocking_key_value_get_bytes=closes, shutdown=lambda: None
  )
  board = runtime_board.RuntimeBoard(client, "h:1")
  with pytest.raises(engine.BoardLost, match="closed"):
    board.get("a", 10.0)
