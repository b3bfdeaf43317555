"""Records RETURNN's JAX updater: python record_jax.py.

Needs returnn, jax and optax. The gradients and the start are those of tensorflow.json.
"""

import json
import pathlib

_HERE = pathlib.Path(__file__).parent
_SOURCE = json.loads((_HERE / "tensorflow.json").read_text())


def cases():
  """Yields configurations."""
  yield {"optimizer": {"class": "adamw", "weight_decay": 0.1, "b2": 0.9}}
  yield {"optimizer": {"class": "adam", "eps": 0.01}}
  yield {"optimizer": {"class": "sgd", "momentum": 0.9}}
  yield {"optimizer": {"class": "sgd"}, "gradient_clip_global_norm": 1.0}


def record(config):
  """Runs RETURNN's updater on the gradients; the parameters after each step."""
  import jax.numpy as jnp
  from returnn.config import Config
  from returnn.jax.updater import Updater

  names = list(_SOURCE["start"])
  params = [jnp.asarray(_SOURCE["start"][name]) for name in names]
  updater = Updater(config=Config(config))
  state, trajectory = updater.init(params), []
  for inputs in _SOURCE["gradients"]["normal"]:
    params, state = updater.step(
      params=params,
      grads=[jnp.asarray(inputs[name]) for name in names],
      opt_state=state,
      learning_rate=_SOURCE["learning_rate"],
    )
    trajectory.append(params)
  return {
    name: [step[i].tolist() for step in trajectory]
    for i, name in enumerate(names)
  }


def main():
  import jax
  import optax
  import returnn

  versions = {
    "jax": jax.__version__,
    "optax": optax.__version__,
    "returnn": returnn.__version__,
  }
  recorded = [
    {"config": config, "trajectory": record(config)} for config in cases()
  ]
  result = {"versions": versions, "cases": recorded}
  (_HERE / "jax.json").write_text(json.dumps(result) + "\n")
  print(len(recorded), "cases")


if __name__ == "__main__":
  main()
