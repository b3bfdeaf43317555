"""Records RETURNN's learning rates: python record_learning_rates.py.

Needs returnn. Each case is a configuration, and scores as they come from epoch to
epoch; the recording is the learning rate of each epoch.
"""

import json
import pathlib
import random

_EPOCHS = 40
_COMMON = {
  "learning_rate": 0.0008,
  "learning_rates": [0.0003 + 0.0005 * i / 9 for i in range(10)],
  "learning_rate_control": "newbob_multi_epoch",
  "learning_rate_control_relative_error_relative_lr": True,
  "newbob_multi_num_epochs": 6,
  "newbob_multi_update_interval": 1,
  "newbob_learning_rate_decay": 0.9,
  "min_learning_rate": 0.0008 / 50,
  "learning_rate_control_min_num_epochs_per_new_lr": 3,
}
_CHOICES = {
  "learning_rate": [0.001, 0.0005],
  "learning_rate_control": [
    "newbob_multi_epoch",
    "newbob",
    "newbob_rel",
    "newbob_abs",
    "newbob_relative",
    "newbob_multi_epoch",
    "constant",
  ],
  "learning_rates": [
    None,
    None,
    [0.0001, 0.0002, 0.0004, 0.0008],
    {"1": 0.002, "7": 0.0003},
  ],
  "min_learning_rate": [0.0, 0.0004, 0],
  "learning_rate_control_relative_error_relative_lr": [True, False, 0, None],
  "newbob_relative_error_div_by_old": [True, False],
  "newbob_multi_num_epochs": [1, 3, 5, 6],
  "newbob_multi_update_interval": [1, 2, 6],
  "newbob_learning_rate_decay": [0.7, 0.9, None],
  "learning_rate_decay": [0.8],
  "learning_rate_growth": [1.1, 1.0, None],
  "newbob_learning_rate_growth": [1.05],
  "newbob_relative_error_threshold": [0.0, -0.002, -0.05, "-0.01"],
  "newbob_relative_error_grow_threshold": [-0.1, -0.06],
  "newbob_error_threshold": [0.0, -0.05],
  "learning_rate_control_min_num_epochs_per_new_lr": [0, 2, 3],
}


def cases():
  """Yields configurations: the common one, and those of a seed."""
  yield _COMMON
  yield {"learning_rate": 0.001, "learning_rate_control": "newbob_multi_epoch"}
  yield {"learning_rate": 0.001, "learning_rate_control": "newbob_abs"}
  rng = random.Random(5)
  for _ in range(70):
    config = {
      key: rng.choice(values)
      for key, values in _CHOICES.items()
      if key.startswith("learning_rate_control") or rng.random() < 0.5
    }
    yield {"learning_rate": 0.001} | config


def scores(seed):
  """Scores that fall, with noise; without one now and then."""
  rng = random.Random(seed)
  noise = rng.choice([0.01, 0.1])
  result = [
    2.0 * 0.96**epoch + noise * rng.random() - (3.0 if seed % 5 == 0 else 0.0)
    for epoch in range(_EPOCHS)
  ]
  if seed % 4 == 0:
    result[8] = None
  return result


def record(config, given):
  """The learning rate of each epoch, and of the one after the last."""
  from returnn.config import Config
  from returnn.learning_rate_control import (
    load_learning_rate_control_from_config,
  )

  rates = config.get("learning_rates")
  if isinstance(rates, dict):
    config = config | {"learning_rates": {int(k): x for k, x in rates.items()}}
  control = load_learning_rate_control_from_config(Config(config))
  result = []
  for epoch, score in enumerate(given, start=1):
    result.append(control.get_learning_rate_for_epoch(epoch))
    if score is not None:
      control.set_epoch_error(epoch, {"dev_score": score})
  result.append(control.get_learning_rate_for_epoch(len(given) + 1))
  return result


def main():
  import returnn

  recorded = []
  for seed, config in enumerate(cases()):
    inputs = [score and round(score, 6) for score in scores(seed)]
    recorded.append(
      {"config": config, "scores": inputs, "rates": record(config, inputs)}
    )
  path = pathlib.Path(__file__).with_name("learning_rates.json")
  result = {"versions": {"returnn": returnn.__version__}, "cases": recorded}
  path.write_text(json.dumps(result) + "\n")
  changed = sum(len(set(case["rates"])) > 2 for case in recorded)
  print(len(recorded), "cases,", changed, "with three rates or more")


if __name__ == "__main__":
  main()
