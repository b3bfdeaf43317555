"""How the numbers of a configuration affect the quorum and waits."""

from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import Job, Rules


def _config(data=None, policy=None, **rules):
  return Config(Job((), Rules(**rules), data=data), None, policy)


def test_empty_gradient_may_be_sent_inline():
  """As where all parameters are of size 0: None is not 0 bytes."""
  assert _config(inline_bytes=0).inline
  assert not _config().inline
