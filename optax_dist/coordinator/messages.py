"""What is written on the board: signed, bounded, and never executed.

A message is a JSON object and a payload of bytes. It is bound to its key by a
tag (HMAC-SHA256 with the job's secret), so that nobody without the secret can
write one, and nobody can repeat one under another key. It is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 4 << 20
_MAX_HEADER = 1 << 20
_MAGIC = b"ODC1"
_TAG = 16
_LENGTH = struct.Struct("<I")
_START = len(_MAGIC) + _TAG + _LENGTH.size

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

Header = dict[str, Any]

# Kinds and the types of their fields; None stands for JSON's null.
_INT, _REAL, _TEXT, _LIST, _BOOL, _DICT = (
  int,
  (int, float),
  str,
  list,
  bool,
  dict,
)
_ID = (int, str)
_NO_INT = (int, type(None))
_NO_REAL = (int, float, type(None))

KINDS: dict[str, dict[str, Any]] = {
  # A replica asks to be let in.
  "hello": {
    "replica": _ID,
    "address": _TEXT,
    "spec": _DICT,
    "step": _INT,
    "state": _TEXT,
  },
  # Who is chief of a term.
  "chief": {"incarnation": _INT},
  # To the chief.
  "arrive": {
    "local_step": _INT,
    "count": _INT,
    "total": _INT,
    "finite": _BOOL,
    "applied": _INT,
    "compute": _NO_REAL,
    "batches": (list, type(None)),
    "sequence": _INT,
    "ahead": _INT,
  },
  "done": {"step": _INT, "attempt": _INT},
  "pass": {"step": _INT, "attempt": _INT},
  "failed": {
    "step": _INT,
    "attempt": _INT,
    "culprit": _NO_INT,
    "reason": _TEXT,
  },
  "ack": {"applied": _INT},
  "behind": {"applied": _INT},
  "leave": {"reason": _TEXT},
  "end": {"reason": _TEXT},
  "fingerprint": {"step": _INT, "params": _TEXT, "state": _TEXT},
  "save": {"after": _INT},
  # The chief's, to a sender of its host: what it has read.
  "read": {"number": _INT},
  # In the log.
  "term": {
    "term": _INT,
    "incarnation": _INT,
    "step": _INT,
    "address": _TEXT,
  },
  "join": {
    "incarnation": _INT,
    "replica": _ID,
    "step": _INT,
    "count": _INT,
    "peer": _NO_INT,
    "view": _DICT,
  },
  "refuse": {"incarnation": _INT, "reason": _TEXT},
  "gone": {"incarnation": _INT, "replica": _ID, "reason": _TEXT},
  "attempt": {
    "step": _INT,
    "attempt": _INT,
    "members": _LIST,
    "audience": _LIST,
    "witness": _NO_INT,
  },
  "abandon": {"step": _INT, "attempt": _INT, "reason": _TEXT},
  "commit": {
    "step": _INT,
    "attempt": _INT,
    "members": _LIST,
    "audience": _LIST,
    "tokens": _LIST,
  },
  "drop": {
    "incarnation": _INT,
    "local_step": _INT,
    "reason": _TEXT,
    "count": _INT,
    "sequence": _INT,
    "tokens": _LIST,
  },
  "token": {"tokens": _LIST},
  "serve": {"peer": _INT, "to": _INT},
  "stall": {"step": _INT, "waited": _REAL, "text": _TEXT},
  "fail": {"reason": _TEXT, "error": _TEXT},
  "save_at": {"step": _INT},
  "finish": {"step": _INT, "reason": _TEXT, "ledger": _DICT},
  "tick": {"ack": _BOOL},
  "resign": {"term": _INT},
  # From one replica to another.
  "snapshot": {"step": _INT, "nbytes": _INT},
  # Anyone's note that the log is gone up to here.
  "trimmed": {"position": _INT},
}


class BadMessage(ValueError):
  """A message is not one of this job's, or not one at all."""


def pack(
  secret: bytes, key: str, header: Mapping[str, Any], payload: bytes = b""
) -> bytes:
  """A message for this key of the board.

  Raises:
    ValueError: it would be larger than `MAX_BYTES`.

  Example:
    >>> blob = pack(b"s", "in/0", {"kind": "ack", "applied": 3})
    >>> unpack(b"s", "in/0", blob)
    ({'kind': 'ack', 'applied': 3}, b'')
  """
  text = _encode(header).encode()
  body = b"".join((_LENGTH.pack(len(text)), text, payload))
  size = len(_MAGIC) + _TAG + len(body)
  if size > MAX_BYTES or len(text) > _MAX_HEADER:
    raise ValueError(
      f"a message of {size:,} bytes for {key!r}: at most {MAX_BYTES:,} fit."
    )
  return b"".join((_MAGIC, _tag(secret, key, body), body))


def unpack(secret: bytes, key: str, blob: bytes) -> tuple[Header, bytes]:
  """The header and payload of a message found under this key.

  Raises:
    BadMessage: it is too large, not of this job, for another key, or its
      header is not one of `KINDS` with the right fields.
  """
  if len(blob) > MAX_BYTES:
    raise BadMessage(f"{len(blob):,} bytes where at most {MAX_BYTES:,} may be")
  if len(blob) < _START or not blob.startswith(_MAGIC):
    raise BadMessage("not a message of optax-dist")
  body = memoryview(blob)[len(_MAGIC) + _TAG :]
  tag = blob[len(_MAGIC) : len(_MAGIC) + _TAG]
  if not hmac.compare_digest(tag, _tag(secret, key, body)):
    raise BadMessage("not signed with this job's secret, or for another key")
  (length,) = _LENGTH.unpack_from(body)
  if length > min(_MAX_HEADER, len(body) - _LENGTH.size):
    raise BadMessage("cut short")
  end = _LENGTH.size + length
  try:
    header = json.loads(bytes(body[_LENGTH.size : end]))
  except (ValueError, RecursionError):
    raise BadMessage("its header is not JSON") from None
  check(header)
  return header, bytes(body[end:])


def check(header: Any) -> None:
  """Raises `BadMessage` unless the header is a known kind's."""
  if type(header) is not dict or type(header.get("kind")) is not str:
    raise BadMessage("its header has no kind")
  fields = KINDS.get(header["kind"])
  if fields is None:
    raise BadMessage(f"unknown kind {header['kind']!r:.40}")
  for name, types in fields.items():
    value = header.get(name, header)
    # A bool is an int to Python, and not to us.
    fits = isinstance(value, types) and (
      types is _BOOL or not isinstance(value, bool)
    )
    if value is header or not fits:
      raise BadMessage(f"{header['kind']}: bad field {name!r}")


def ticket(secret: bytes, *parts: Any) -> int:
  """A number below 2**62 that members compute alike and others can't guess.

  Example:
    >>> ticket(b"s", "mean", 3, 1) == ticket(b"s", "mean", 3, 1)
    True
  """
  text = "\0".join(map(str, parts)).encode()
  digest = hmac.digest(secret, text, "sha256")
  # 0 stands for no ticket.
  return (int.from_bytes(digest[:8], "little") >> 2) or 1


def _tag(secret: bytes, key: str, body: bytes | memoryview) -> bytes:
  # At once: several times as fast as an object that is fed.
  told = b"".join((key.encode(), b"\0", body))
  return hmac.digest(secret, told, "sha256")[:_TAG]
