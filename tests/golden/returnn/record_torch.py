"""Records RETURNN's PyTorch updater: python record_torch.py.

Needs torch and returnn. The gradients and the start are those of tensorflow.json.
"""

import json
import pathlib

_HERE = pathlib.Path(__file__).parent
_SOURCE = json.loads((_HERE / "tensorflow.json").read_text())
#: Steps of each run: RAdam's rule changes at the sixth.
_REPEATS = 2


def cases():
  """Yields the name of a case, its configuration and its kind of gradients."""
  for name, config in {
    "adam": {},
    "adam_options": {"betas": [0.8, 0.95], "epsilon": 1e-3},
    "adam_decay": {"weight_decay": 0.1},
    "adam_decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "adamw": {},
    "adamw_decay": {"weight_decay": 0.1, "eps": 1e-16},
    "adamw_no_decay": {"weight_decay": 0.0},
    "nadam": {},
    "nadam_decay": {"weight_decay": 0.1, "momentum_decay": 0.1},
    "nadam_decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "radam": {},
    "radam_decay": {"weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 0.01},
    "radam_decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "sgd": {},
    "sgd_decay": {"weight_decay": 0.1, "momentum": 0.9},
    "sgd_nesterov": {"momentum": 0.9, "nesterov": True},
    "sgd_maximize": {"maximize": True, "weight_decay": 0.1},
    "adagrad": {},
    "adagrad_options": {
      "lr_decay": 0.1,
      "weight_decay": 0.1,
      "initial_accumulator_value": 0.5,
    },
    "adadelta": {},
    "adadelta_options": {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1},
    "adamax": {},
    "adamax_options": {"betas": [0.8, 0.9], "weight_decay": 0.1},
    "rmsprop": {},
    "rmsprop_momentum": {"momentum": 0.9, "alpha": 0.9, "weight_decay": 0.1},
    "rmsprop_centered": {"centered": True, "momentum": 0.5},
  }.items():
    optimizer = {"class": name.split("_")[0]} | config
    yield name, {"optimizer": optimizer}, "normal"
  off = {
    "gradient_clip": 0,
    "gradient_clip_global_norm": 0,
    "gradient_noise": 0,
    "accum_grad_multiple_step": 1,
  }
  sgd = {"optimizer": {"class": "sgd"}}
  yield "all_off", sgd | off, "normal"
  for change in (
    {"gradient_clip": 0.5},
    {"gradient_clip_global_norm": 1.0},
    {"accum_grad_multiple_step": 3},
    {"accum_grad_multiple_step": 2, "gradient_clip_global_norm": 2.0},
    {"gradient_clip": 0.5, "gradient_clip_global_norm": 1.0},
  ):
    label = "_".join(f"{key}_{value}" for key, value in change.items())
    for kind in ("normal", "zero"):
      yield f"{label}_{kind}", sgd | change, kind


def dynamic(*, global_train_step, learning_rate, **_):
  """A learning rate for each step."""
  return learning_rate * 0.9**global_train_step


def record(config, kind):
  """Runs RETURNN's updater on the gradients; the parameters after each step."""
  import torch
  from returnn.config import Config
  from returnn.torch.updater import Updater

  module = torch.nn.Module()
  # RETURNN decays no bias.
  for name, value in _SOURCE["start"].items():
    parameter = torch.nn.Parameter(torch.tensor(value))
    module.register_parameter({"b": "bias"}.get(name, name), parameter)
  module.train()
  updater = Updater(
    config=Config(config | {"dynamic_learning_rate": dynamic}),
    network=module,
    device="cpu",
    initial_learning_rate=0.1,
  )
  updater.create_optimizer()
  steps = config.get("accum_grad_multiple_step", 1)
  trajectory = []
  for i, inputs in enumerate(_SOURCE["gradients"][kind] * _REPEATS):
    # As in returnn.torch.engine.Engine.train_epoch.
    updater.set_current_train_step(global_train_step=i, epoch=1)
    if i % steps == 0:
      updater.zero_grad()
    loss = sum(
      torch.sum(parameter * torch.tensor(inputs[name[:1]]))
      for name, parameter in module.named_parameters()
    )
    loss.backward()
    if i % steps == steps - 1:
      updater.step()
    trajectory.append(
      {
        name[:1]: p.detach().numpy().copy()
        for name, p in module.named_parameters()
      }
    )
  return trajectory


def main():
  import returnn
  import torch

  recorded = []
  for name, config, kind in cases():
    trajectory = record(config, kind)
    recorded.append(
      {
        "name": name,
        "config": config,
        "gradients": kind,
        "trajectory": {
          key: [step[key].tolist() for step in trajectory] for key in ("w", "b")
        },
      }
    )
  versions = {"torch": torch.__version__, "returnn": returnn.__version__}
  result = {"versions": versions, "repeats": _REPEATS, "cases": recorded}
  (_HERE / "torch.json").write_text(json.dumps(result) + "\n")
  print(len(recorded), "cases")


if __name__ == "__main__":
  main()
