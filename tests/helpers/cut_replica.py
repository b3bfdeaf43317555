"""A replica on its own host, configured by the arguments from `cuts.Run`.

It says in lines of JSON what each step was, and trains until it reads a line.
"""

import json
import socket
import sys
import threading
import time

import outcomes


def main(options):
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  asked = threading.Event()

  def wait_for_word():
    sys.stdin.readline()
    asked.set()

  def say(**fields):
    print(json.dumps({"at": time.monotonic(), **fields}), flush=True)

  threading.Thread(target=wait_for_word, daemon=True).start()
  if options.get("bind") == "own name":
    options["bind"] = socket.gethostname()
  number, pause, width = (
    options["replica"],
    options.pop("pause"),
    options.pop("width"),
  )
  params = {"w": jnp.linspace(-1.0, 1.0, width)}
  gradient = jax.jit(
    lambda p, x: jax.tree.map(lambda v: 0.1 * v + jnp.sin(x + v), p)
  )
  seen = {**outcomes.none_yet(), "prints": {}}
  waited = 0.0
  with coordinator.join(optax.adam(0.01), params, **options) as replica:
    say(event="joined")
    while not (asked.is_set() or replica.finished):
      time.sleep(pause)
      call = len(seen["calls"])
      seen["calls"].append(call)
      x = jnp.float32(10.0 * number + call % 100)
      outcome = replica.step(
        gradient(replica.params, x), batch=[number, 0, call]
      )
      waited = max(waited, outcome.waited)
      outcomes.note(seen, call, outcome)
      seen["prints"][outcome.global_step] = replica.fingerprint()
      say(
        event="step",
        step=outcome.global_step,
        members=list(outcome.members),
        leader=replica.is_leader,
      )
    replica.finish()
    seen["prints"][replica.global_step] = replica.fingerprint()
  say(
    event="result",
    number=number,
    **seen,
    waited=waited,
    step=replica.global_step,
    stats=replica.stats(),
  )


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
