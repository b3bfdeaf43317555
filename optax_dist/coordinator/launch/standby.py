"""A process that stands by: it has imported and compiled, and waits for a number.

    launcher   starts it without a number -- a replica dies --> tells it that number
    process    imports, calls join -> "standby" ... waits ... -> joins as that replica

Until then it is in no run, and nobody knows of it but its launcher.
"""

from __future__ import annotations

import os

from optax_dist.coordinator.launch.channel import Channel
from optax_dist.coordinator.launch.environment import Environment, variable


def offer(told: Environment) -> dict[str, str]:
  """The message to a process that becomes a replica: its variables."""
  names = [variable(name) for name in ("replica", "restarts")]
  variables = told.variables()
  return {name: variables[name] for name in names}


def wait(line: Channel) -> Environment:
  """Waits until this process becomes a replica; its launcher ends it otherwise.

  Returns:
    Its environment, which is that of the process from now on.
  """
  line.say("standby")
  for event in line.events():
    os.environ.update(event["variables"])
    del os.environ[variable("standby")]
    return Environment.read()
  raise SystemExit("The launcher of this standby has ended.")
