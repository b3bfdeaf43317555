"""The handshake, byte by byte, without sockets."""

import itertools

import pytest

from optax_dist.coordinator.transport import handshake

_SECRET = b"sixteen bytes ok"
_KEY = handshake.job_key(_SECRET, b"run 1")


def _take(side):
  """All that a side has to write."""
  output = b"".join(side.output())
  side.sent(len(output))
  return output


def _feed(side, data):
  """Lets a side read bytes until the handshake is over."""
  while data and not side.done:
    (room,) = side.room()
    taken = min(len(data), len(room))
    room[:taken] = data[:taken]
    side.received(taken)
    data = data[taken:]
  return data


def _pair(dialer="a", acceptor="b", key=_KEY, other=_KEY):
  return (
    handshake.Handshake(key, dialer, wanted=acceptor),
    handshake.Handshake(other, acceptor),
  )


def _talk(dialer, acceptor, size=10_000):
  """Carries bytes to and fro; returns all that was said."""
  said = []
  for _ in range(6):
    for one, other in ((dialer, acceptor), (acceptor, dialer)):
      output = _take(one)
      said.append(output)
      for start in range(0, len(output), size):
        _feed(other, output[start : start + size])
      if other.undecided:
        other.use()
  return said


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_smaller_name_decides_which_connection_is_kept(names):
  dialer, acceptor = _pair(*names)
  _feed(acceptor, _take(dialer))
  _feed(dialer, _take(acceptor))
  if names == "ab":
    assert dialer.undecided
    assert not dialer.output()
    dialer.use()
    _feed(acceptor, _take(dialer))
  else:
    _feed(acceptor, _take(dialer))
    assert acceptor.undecided
    assert not dialer.done
    acceptor.use()
    _feed(dialer, _take(acceptor))
  assert dialer.done
  assert acceptor.done


def test_a_reflected_handshake_is_refused():
  dialer = handshake.Handshake(_KEY, "a", wanted="b")
  with pytest.raises(handshake.Refused):
    _feed(dialer, _take(dialer))


def test_each_changed_byte_is_refused():
  dialer, acceptor = _pair()
  said = [text for text in _talk(dialer, acceptor) if text]
  for part, text in enumerate(said):
    for at in range(len(text)):
      sides = _pair()
      bad = False
      try:
        for step, (one, other) in enumerate(
          [(0, 1), (1, 0), (0, 1)][: len(said)]
        ):
          output = bytearray(_take(sides[one]))
          if step == part and at < len(output):
            output[at] ^= 1
          _feed(sides[other], bytes(output))
          if sides[other].undecided:
            sides[other].use()
      except handshake.Refused:
        bad = True
      # A longer length waits for bytes that never come.
      assert bad or not sides[1].done, (part, at)


def test_another_version_is_named_to_both():
  dialer, acceptor = _pair()
  hello = bytearray(_take(dialer))
  hello[4] = 9
  with pytest.raises(handshake.Refused, match="version 9, not 1"):
    _feed(acceptor, bytes(hello))
  with pytest.raises(handshake.Refused, match="speaks version 1, not 9"):
    _feed(dialer, _take(acceptor))


@pytest.mark.parametrize("secret", [b"x", b"fifteen bytes !"])
def test_short_secrets_are_refused(secret):
  with pytest.raises(ValueError, match="at least 16 bytes"):
    handshake.job_key(secret, b"")


def test_keys_differ_by_secret_and_run():
  keys = {
    handshake.job_key(secret, run)
    for secret, run in itertools.product(
      (b"", bytes(16), bytes(17)), (b"", b"1", b"2")
    )
  }
  assert len(keys) == 9
