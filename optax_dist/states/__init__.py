"""Operations on the state of a transform.

They carry it through a map, place it on devices, resize it for another number
of replicas, and find its slots.
"""

from typing import TYPE_CHECKING

from optax_dist._internal import lazy

if TYPE_CHECKING:
  from optax_dist._internal.placement.place import place
  from optax_dist._internal.placement.specs import state_axes, state_specs
  from optax_dist.states.center import reset_to_center, resize_from_center
  from optax_dist.states.resize import resize_replicas
  from optax_dist.states.resize_parts import resize_sharded
  from optax_dist.states.slots import get_slot, slot_names
else:
  __getattr__, __dir__ = lazy.names(__name__)

__all__ = [
  "get_slot",
  "place",
  "reset_to_center",
  "resize_from_center",
  "resize_replicas",
  "resize_sharded",
  "slot_names",
  "state_axes",
  "state_specs",
]
