"""Arrays of a state that each shard of a parameter has for itself.

With it, PowerSGD works on parameters that are sharded over a model axis, and its state
has specs.
"""

from typing import Any, NamedTuple


class PerShard(NamedTuple):
  """Marks an array that belongs to one shard of a parameter.

  It is not a piece of anything that the whole parameter has. Inside a map it is
  this shard's; as a whole, the shards' follow each other along the first axis.

  Attributes:
    value: an array of any shape, the same for all shards.
  """

  value: Any
