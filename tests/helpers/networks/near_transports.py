"""Transports of this process that are connected to each other."""

from optax_dist.coordinator.transport import interface, sockets

# No peer is lost only because this machine is busy.
_PATIENT = interface.Limits(
  silence=interface.fixed(300.0), connect=300.0, handshake=300.0
)

_made = []


def connected(*names):
  """A transport of each name, all of them connected by sockets of this host.

  One thread drives all of them. `close_all` closes them.
  """
  made = [sockets.Transport(name, limits=_PATIENT) for name in names]
  _made.extend(made)
  for index, one in enumerate(made):
    for other in made[:index]:
      one.connect(other.name, other.address)
  while any(len(one.peers()) < len(made) - 1 for one in made):
    for one in made:
      one.poll(0)
  return made


def kill(transport):
  """Ends a transport as the death of its process would: without a goodbye."""
  transport._in_child()


def close_all():
  """Closes what `connected` has made since the last call."""
  while _made:
    _made.pop().close()
