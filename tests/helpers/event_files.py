"""Reads TensorBoard's event files, as its own reader would."""

import collections
import struct

from tensorboardX import crc32c
from tensorboardX.proto import event_pb2


def read(folder):
  """Returns the points of all event files in a folder, by tag, in order.

  Each record of a file has its length and its bytes, and a checksum of either.
  """
  points = collections.defaultdict(list)
  for path in sorted(folder.rglob("*tfevents*")):
    data = path.read_bytes()
    while data:
      length, check = struct.unpack("<QI", data[:12])
      assert check == _masked(data[:8])
      raw = data[12 : 12 + length]
      (check,) = struct.unpack("<I", data[12 + length : 16 + length])
      assert check == _masked(raw)
      data = data[16 + length :]
      event = event_pb2.Event.FromString(raw)
      for value in event.summary.value:
        points[value.tag].append((event.step, value.simple_value))
  return points


def _masked(raw):
  crc = crc32c.crc32c(raw)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
