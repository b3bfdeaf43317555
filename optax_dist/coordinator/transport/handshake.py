"""The handshake by which two processes authenticate each other.

    dialer                                        acceptor
    HELLO  nonce, name, wanted name, last   -->
           <--   CHALLENGE  nonce, name, tag over all so far
    PROOF  tag over all so far              -->
           <--   USE  tag over all so far, if the acceptor decides

A tag is HMAC-SHA256 under a key derived from the job's secret and the run's
nonce. Both sides contribute a nonce, so recorded messages can't be replayed, in
this run or another. If two dial each other at once, the one with the smaller
name decides which connection is used: as dialer by its PROOF, as acceptor by
its USE.

There are no sockets here: bytes in, bytes out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import struct
from typing import Literal, NamedTuple

VERSION = 1
MAX_NAME = 64
_MAGIC = b"OxDt"
_PREFIX = struct.Struct("<4sHBH")  # Magic, version, kind, length of the body.
# The first byte of a record of TLS: of an alert, and of a handshake.
_TLS = 21, 22
_HELLO, _CHALLENGE, _PROOF, _USE, _REFUSE = range(1, 6)
_NONCE, _TAG, SESSION = 32, 32, 8
_MAX_BODY = 2 * (MAX_NAME + 1) + _NONCE + _TAG + SESSION
NO_SESSION = bytes(SESSION)


class Refused(ConnectionError):
  """The other side was rejected, or rejects this one; the message says why.

  Attributes:
    how: the peer is lost: "gone" if another process is at its address.
  """

  def __init__(self, reason: str, how: Literal["refused", "gone"] = "refused"):
    super().__init__(reason)
    self.how = how


@dataclasses.dataclass
class Identity:
  """A process's name, secret and run.

  Attributes:
    name: its name.
    secret: the job's secret; b"" for none: then frames are not signed.
    server: the name of a process that this one connects to, but never accepts; "" for
      none.
    key: the run's key: peers with another key are refused.
  """

  name: str
  secret: bytes = dataclasses.field(repr=False)
  server: str = ""
  key: bytes = dataclasses.field(init=False, repr=False)

  def __post_init__(self) -> None:
    self.key = self.key_of(b"")

  def key_of(self, run: bytes) -> bytes:
    """The key of a run of its job; raises as `check_secret` does."""
    return job_key(self.secret, run)


class Keys(NamedTuple):
  """Keys that both sides share after a handshake.

  Attributes:
    send: signs what this side sends.
    receive: signs what it receives.
    session: identifies the connection.
  """

  send: bytes
  receive: bytes
  session: bytes


def check_secret(secret: bytes) -> None:
  """Checks a job's secret; an empty one stands for none.

  Raises:
    ValueError: it is too short to be safe.
  """
  if 0 < len(secret) < 16:
    raise ValueError(
      f"A secret has at least 16 bytes, got {len(secret)}. Make one with"
      " python -c 'import secrets; print(secrets.token_hex())'."
    )


def job_key(secret: bytes, run: bytes) -> bytes:
  """The key of a job's run; raises as `check_secret` does."""
  check_secret(secret)
  # Hashed first: HMAC pads keys with zeros, so keys with trailing zeros
  # collide.
  key = hashlib.sha256(secret).digest()
  return hmac.digest(key, b"optax-dist transport\0" + run, "sha256")


class Handshake:
  """One side of a handshake.

  Attributes:
    peer: the other side's name; authenticated once `undecided` or `done`.
    last: the dialer's previous connection with this side.
    undecided: whether this side decides; `use` accepts the connection.
    done: whether the handshake is complete and the connection is used.
    keys: the keys, once done.
  """

  def __init__(
    self, key: bytes, name: str, wanted: str = "", last: bytes = NO_SESSION
  ):
    """Starts a handshake.

    Args:
      key: see `job_key`.
      name: name of this side.
      wanted: name of the peer dialed; "" on the accepting side.
      last: this side's previous connection with it.
    """
    self._key = key
    self._name = check_name(name)
    self._wanted = wanted
    self._transcript = b""
    self._part, self._filled = bytearray(_PREFIX.size), 0
    self._expected = _CHALLENGE if wanted else _HELLO
    self._output = b""
    self.peer = wanted
    self.last = last
    self.undecided = self.done = False
    self.keys: Keys | None = None
    if wanted:
      nonce = secrets.token_bytes(_NONCE)
      self._send(_HELLO, nonce + last + _text(name) + _text(wanted))

  def output(self) -> list[memoryview | bytes]:
    """The next bytes to write; see `sent`."""
    return [self._output] if self._output else []

  def sent(self, nbytes: int) -> None:
    """Reports how many bytes of `output` were written."""
    self._output = self._output[nbytes:]

  def room(self) -> list[memoryview]:
    """The buffer for the next bytes, none of which come after the handshake."""
    return [memoryview(self._part)[self._filled :]]

  def received(self, nbytes: int) -> None:
    """Processes bytes that were read.

    Raises:
      Refused: they are not a peer's handshake.
    """
    self._filled += nbytes
    if self._part[0] in _TLS:
      self.refuse("this side has no certificates, and the other side has")
      raise Refused("it has certificates, and this side none")
    if not _MAGIC.startswith(self._part[: min(self._filled, 4)]):
      raise Refused("it does not speak this protocol")
    if self._filled < len(self._part):
      return
    head, body = bytes(self._part[: _PREFIX.size]), self._part[_PREFIX.size :]
    _, version, kind, length = _PREFIX.unpack(head)
    if version != VERSION:
      self.refuse(f"it speaks version {VERSION}, not {version}")
      raise Refused(f"it speaks version {version}, not {VERSION}")
    if length > _MAX_BODY:
      raise Refused("it sent too much in its handshake")
    if len(body) < length:
      self._part = self._part + bytes(length)
      return
    self._part, self._filled = bytearray(_PREFIX.size), 0
    self._on_message(kind, head, bytes(body))

  def use(self) -> None:
    """Accepts this connection."""
    self.undecided = False
    self._send(_PROOF if self._wanted else _USE)
    self._finish()

  def refuse(self, reason: str) -> None:
    """Rejects this connection, and tells the other side why."""
    text = reason.encode()[:_MAX_BODY]
    self._output += _PREFIX.pack(_MAGIC, VERSION, _REFUSE, len(text)) + text

  def _on_message(self, kind: int, head: bytes, body: bytes) -> None:
    if kind == _REFUSE:
      reason = body.decode(errors="replace")
      if reason == _not_here(self._wanted):
        why = (
          f"another process is at its address ({reason}). If it has not ended, two"
          " tell others the same address: see ports= and advertise="
        )
        raise Refused(why, "gone")
      raise Refused(f"it refused: {reason!r}")
    if kind != self._expected:
      raise Refused("it sent another part of the handshake than was due")
    if kind != _HELLO:
      self._check(head + body[:-_TAG], body[-_TAG:])
    self._transcript += head + body
    try:
      if kind == _HELLO:
        self._hello(body)
      elif kind == _CHALLENGE:
        self.peer, rest = _name(body[_NONCE:-_TAG])
        if self.peer != self._wanted or rest:
          raise Refused(f"{self.peer!r} is at the address of {self._wanted!r}")
    except (IndexError, ValueError) as error:
      raise Refused(f"a handshake that can't be read: {error}") from None
    if kind == _HELLO:
      return
    decides = self._name < self.peer
    if kind == _USE or (kind == _PROOF and not decides):
      self._finish()
    elif decides:
      self.undecided = True
    else:
      self._send(_PROOF)
      self._expected = _USE

  def _hello(self, body: bytes) -> None:
    self.last = body[_NONCE : _NONCE + SESSION]
    self.peer, rest = _name(body[_NONCE + SESSION :])
    wanted, rest = _name(rest)
    if wanted != self._name or self.peer == self._name or rest:
      self.refuse(_not_here(wanted))
      raise Refused(f"it looks for {wanted!r}")
    self._send(_CHALLENGE, secrets.token_bytes(_NONCE) + _text(self._name))
    self._expected = _PROOF

  def _send(self, kind: int, body: bytes = b"") -> None:
    tagged = kind != _HELLO
    length = len(body) + (_TAG if tagged else 0)
    text = _PREFIX.pack(_MAGIC, VERSION, kind, length) + body
    if tagged:
      text += self._tag(text, bool(self._wanted))
    self._transcript += text
    self._output += text

  def _tag(self, text: bytes, dialer: bool) -> bytes:
    side = b"dialer\0" if dialer else b"acceptor\0"
    return hmac.digest(self._key, side + self._transcript + text, "sha256")

  def _check(self, text: bytes, tag: bytes) -> None:
    if not hmac.compare_digest(self._tag(text, not self._wanted), tag):
      reason = "another secret, or another run"
      self.refuse(reason)
      raise Refused(f"it has {reason}")

  def _finish(self) -> None:
    def derive(use: bytes) -> bytes:
      return hmac.digest(self._key, use + self._transcript, "sha256")

    ends = derive(b"dialer sends\0"), derive(b"acceptor sends\0")
    send, receive = ends if self._wanted else ends[::-1]
    self.keys = Keys(send, receive, derive(b"session\0")[:SESSION])
    self.done = True


def _not_here(wanted: str) -> str:
  return f"no {wanted!r} here"


def check_name(name: str) -> str:
  """Returns the name if it is valid.

  Raises:
    ValueError: it is empty or too long.
  """
  if not 0 < len(name.encode()) <= MAX_NAME:
    raise ValueError(f"A name has 1 to {MAX_NAME} bytes, got {name!r:.100}.")
  return name


def _text(name: str) -> bytes:
  raw = check_name(name).encode()
  return bytes([len(raw)]) + raw


def _name(body: bytes) -> tuple[str, bytes]:
  end = 1 + body[0]
  if end > len(body):
    raise ValueError("cut short")
  return check_name(body[1:end].decode()), body[end:]
