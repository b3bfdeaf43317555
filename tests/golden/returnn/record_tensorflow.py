"""Records RETURNN's TensorFlow updater: python record_tensorflow.py.

Needs tensorflow, tf_keras and returnn. Every case is a configuration whose updater
gets the same gradients; what the parameters are after each step is the recording.
"""

import json
import pathlib

import numpy as np

_STEPS = 8
_L2 = {"w": 0.01, "b": 0.0}

_SGD = {"class": "GradientDescent"}
_SETTINGS = """accum_grad_multiple_step gradient_noise gradient_clip
  gradient_clip_norm gradient_clip_avg_norm gradient_clip_global_norm
  gradient_nan_inf_filter grad_norm_to_clip_to_zero maximize_grad_norm
  decouple_constraints"""
_OFF = dict.fromkeys(_SETTINGS.split(), 0)


_LAYER = {
  "gradient_clip": 0.3,
  "accum_grad_multiple_step": 2,
  "optimizer": {"class": "adam", "learning_rate_multiplier": 0.5},
}


def cases():
  """Yields the name of a case, its configuration and its kind of gradients."""
  yield "all_off", {"optimizer": _SGD} | _OFF, "normal"
  none = dict.fromkeys(_OFF, None)
  yield "all_none", {"optimizer": {"class": "adam"}} | none, "normal"
  for name, value in (
    ("accum_grad_multiple_step", 3),
    ("accum_grad_multiple_step", 1),
    ("gradient_clip", 0.5),
    ("gradient_clip_norm", 1.0),
    ("gradient_clip_avg_norm", 0.2),
    ("gradient_clip_global_norm", 1.0),
    ("grad_norm_to_clip_to_zero", 2.5),
    ("gradient_nan_inf_filter", True),
    ("decouple_constraints", True),
    ("decouple_constraints_factor", 0.5),
    ("dynamic_learning_rate", {"interval": 3, "decay": 0.5}),
  ):
    for optimizer in (_SGD, {"class": "adam"}):
      label = f"{name}_{value if np.isscalar(value) else 'dict'}"
      yield (
        f"{label}_{optimizer['class']}",
        {"optimizer": optimizer, name: value},
        ("normal"),
      )
  together = {
    "optimizer": {"class": "rmsprop", "momentum": 0.5, "decay": 0.8},
    "accum_grad_multiple_step": 2,
    "gradient_clip": 0.8,
    "gradient_clip_norm": 1.0,
    "gradient_clip_avg_norm": 0.4,
    "gradient_clip_global_norm": 1.5,
    "gradient_nan_inf_filter": True,
    "grad_norm_to_clip_to_zero": 4.0,
    "decouple_constraints": True,
    "dynamic_learning_rate": {"interval": 4, "decay": 0.7},
  }
  for kind in ("normal", "broken", "zero"):
    yield f"together_{kind}", together, kind
  for name in (
    "gradient_clip",
    "gradient_clip_norm",
    "gradient_clip_global_norm",
    "grad_norm_to_clip_to_zero",
  ):
    config = {"optimizer": {"class": "momentum"}, "momentum": 0.9, name: 2.0}
    yield f"zero_{name}", config, "zero"
    config = config | {"gradient_nan_inf_filter": True}
    yield f"broken_{name}", config, "broken"
    config = config | {"accum_grad_multiple_step": 2}
    yield f"accumulated_{name}", config, "normal"
    yield f"accumulated_broken_{name}", config, "broken"
  for old in (
    {"adam": True},
    {"adadelta": True},
    {"adagrad": True},
    {"rmsprop": 0.7},
    {"rmsprop": True},
    {"rmsprop": True, "momentum": 0.5},
    {"momentum": 0.9},
    {"adam": False, "momentum": 0.9},
    {"adam": True, "optimizer_epsilon": 0.1},
  ):
    yield "old_" + "_".join(f"{k}_{v}" for k, v in old.items()), old, "normal"
  yield (
    "multiplier",
    {
      "optimizer": {"class": "adam", "learning_rate_multiplier": 0.25},
      "optimizer_epsilon": 1e-4,
    },
    "normal",
  )
  for kind in ("ftrl", "proximaladagrad"):
    yield (
      f"decayed_{kind}",
      {
        "optimizer": {"class": kind},
        "decouple_constraints": True,
      },
      "normal",
    )


#: Row 0 isn't looked up.
_ROWS = [1, 1]
_SPARSE = {
  "adagrad": {"gradient_clip_norm": 0.5, "gradient_nan_inf_filter": True},
  "momentum": {"momentum": 0.9, "gradient_clip": 0.3},
  "adam": {"gradient_clip_global_norm": 1.0, "gradient_clip_norm": 1.5},
  "adadelta": {"gradient_clip_avg_norm": 0.1},
  "rmsprop": {"grad_norm_to_clip_to_zero": 3.0},
  "ftrl": {"accum_grad_multiple_step": 2, "gradient_clip_global_norm": 1.0},
}


def gradients(kind):
  """The gradients of each step."""
  rng = np.random.RandomState(7)
  result = []
  for step in range(_STEPS):
    scale = np.exp(rng.uniform(-1, 1))
    g = {
      "w": (scale * rng.randn(2, 3)).astype("float32"),
      "b": (scale * rng.randn(2)).astype("float32"),
    }
    if kind == "broken" and step in (2, 3, 6):
      g["w"][0, 1] = {2: np.nan, 3: np.inf, 6: -np.inf}[step]
    if kind == "zero" and step in (0, 3, 4):
      g = {key: np.zeros_like(x) for key, x in g.items()}
    result.append(g)
  return result


def start():
  """The parameters at the start."""
  rng = np.random.RandomState(3)
  return {
    "w": rng.randn(2, 3).astype("float32"),
    "b": rng.randn(2).astype("float32"),
  }


def record(
  config, kind, loss_of=lambda v, fed: v * fed, mark=None, reset_after=None
):
  """Runs RETURNN's updater on the gradients; the parameters after each step."""
  import tensorflow as tf
  from returnn.config import Config
  from returnn.tf.updater import Updater
  from returnn.util.basic import BackendEngine

  v1 = tf.compat.v1
  BackendEngine.selected_engine = BackendEngine.TensorFlowNetDict
  with tf.Graph().as_default(), v1.Session() as session:
    variables = {
      name: v1.get_variable(name, initializer=value)
      for name, value in start().items()
    }
    fed = {
      name: v1.placeholder("float32", value.shape, f"gradient_{name}")
      for name, value in start().items()
    }
    if "decouple_constraints" in config:
      for name, l2 in _L2.items():
        variables[name].RETURNN_constraint_L2 = l2
    if mark:
      mark(variables)
    loss = tf.add_n([v1.reduce_sum(loss_of(variables[k], fed[k])) for k in fed])
    step = v1.get_variable("global_step", initializer=np.int64(0))
    updater = Updater(
      Config(config),
      initial_learning_rate=0.1,
      objective=loss,
      global_train_step_var=step,
    )
    updater.set_trainable_vars(list(variables.values()))
    op = updater.get_optim_op()
    session.run(v1.global_variables_initializer())
    updater.init_optimizer_vars(session)
    updater.set_learning_rate(0.1, session)
    trajectory = []
    for step, inputs in enumerate(gradients(kind)):
      if reset_after and step % reset_after == 0:
        # As returnn.tf.engine.Runner does.
        updater.init_optimizer_vars(session)
      session.run(op, {fed[name]: inputs[name] for name in fed})
      trajectory.append(session.run(variables))
  return trajectory


def record_maximized(factor):
  """`maximize_grad_norm`, with a loss whose gradient has a gradient."""
  config = {"optimizer": _SGD, "maximize_grad_norm": factor}
  return record(config, "normal", lambda v, fed: v * v * fed / 2)


def record_of_layers():
  """`updater_opts` of a layer: other settings for its variables."""
  from returnn.util.basic import CollectionReadCheckCovered

  def mark(variables):
    options = CollectionReadCheckCovered(dict(_LAYER))
    variables["w"].RETURNN_updater_opts = options

  config = {"optimizer": _SGD, "gradient_clip_norm": 1.0}
  return record(config, "normal", mark=mark)


def record_decay_of_2021(l2, rates):
  """`decouple_constraints` as it was before March 2022, in its own words."""
  import tensorflow as tf

  v1 = tf.compat.v1
  with tf.Graph().as_default(), v1.Session() as session:
    # The variables of that time: those of TensorFlow 2 are read at any time.
    variable = v1.get_variable(
      "w", initializer=start()["w"], use_resource=False
    )
    fed, rate = (v1.placeholder("float32", shape) for shape in ((2, 3), ()))
    loss = v1.reduce_sum(variable * fed)
    op = v1.train.AdamOptimizer(rate, epsilon=1e-16).minimize(loss)
    constraints = l2 * 2 * tf.nn.l2_loss(variable)
    factor = rate / float(rates[0]) * 0.025
    sgd = v1.train.GradientDescentOptimizer(learning_rate=factor)
    with tf.control_dependencies([op]):
      op = sgd.minimize(constraints, var_list=[variable])
    session.run(v1.global_variables_initializer())
    trajectory = []
    for step, inputs in enumerate(gradients("normal")):
      session.run(op, {fed: inputs["w"], rate: rates[step]})
      trajectory.append({"w": session.run(variable)})
  return trajectory


def record_sparse(config):
  """Gradients of rows of a table, of which one comes twice."""
  import tensorflow as tf

  return record(
    config,
    "normal",
    lambda v, fed: tf.gather(v, _ROWS) * fed if len(v.shape) > 1 else v * fed,
  )


def _as_lists(trajectory):
  return {
    key: [step[key].tolist() for step in trajectory] for key in trajectory[0]
  }


def main():
  import returnn
  import tensorflow as tf

  tf.compat.v1.disable_eager_execution()
  recorded = []
  for name, config, kind in cases():
    trajectory = record(config, kind)
    recorded.append(
      {
        "name": name,
        "config": config,
        "gradients": kind,
        "trajectory": _as_lists(trajectory),
      }
    )
  rates = [0.1, 0.1, 0.05, 0.05, 0.1, 0.02, 0.02, 0.01]
  result = {
    "versions": {
      "tensorflow": tf.__version__,
      "returnn": returnn.__version__,
    },
    "learning_rate": 0.1,
    "l2": _L2,
    "start": {key: x.tolist() for key, x in start().items()},
    "gradients": {
      kind: [
        {key: x.tolist() for key, x in step.items()} for step in gradients(kind)
      ]
      for kind in ("normal", "zero", "broken")
    },
    "cases": recorded,
    "rows": _ROWS,
    "sparse": [
      {"config": config, "trajectory": _as_lists(record_sparse(config))}
      for config in (
        {"optimizer": {"class": name}} | settings
        for name, settings in _SPARSE.items()
      )
    ],
    "reset": {
      "steps": 3,
      "trajectory": _as_lists(
        record({"optimizer": {"class": "adam"}}, "normal", reset_after=3)
      ),
    },
    "maximized": {
      "factor": 0.5,
      "trajectory": _as_lists(record_maximized(0.5)),
    },
    "of_layers": {
      "layer": _LAYER,
      "trajectory": _as_lists(record_of_layers()),
    },
    "decay_of_2021": {
      "l2": 5.0,
      "rates": rates,
      "trajectory": _as_lists(record_decay_of_2021(5.0, rates)),
    },
  }
  path = pathlib.Path(__file__).with_name("tensorflow.json")
  path.write_text(json.dumps(result) + "\n")
  print(len(recorded), "cases", path.stat().st_size, "bytes")


if __name__ == "__main__":
  main()
