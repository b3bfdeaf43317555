"""Trains small networks in virtual time, for ``simulate --train``."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.axes
import numpy as np
import optax

from optax_dist import simulate
from optax_dist.cli import panels, tables
from optax_dist.simulate.training import Evaluate, Gradient, Training

BATCH = 16
_HIDDEN = 64


def problem() -> tuple[Gradient, Evaluate]:
  """The gradient of a key's batch, and loss and accuracy on the test data."""
  from sklearn import datasets, model_selection

  pixels, digits = datasets.load_digits(return_X_y=True)
  parts = model_selection.train_test_split(
    jnp.asarray(pixels / 16, jnp.float32),
    jnp.asarray(digits, jnp.int32),
    test_size=360,
    stratify=digits,
    random_state=0,
  )
  images, test_images, labels, test_labels = parts

  def gradient(params: Any, key: jax.Array) -> Any:
    batch = jax.random.randint(key, (BATCH,), 0, labels.size)
    return jax.grad(_loss)(params, images[batch], labels[batch])

  def evaluate(params: Any) -> dict[str, jax.Array]:
    right = jnp.argmax(_logits(params, test_images), -1) == test_labels
    return {
      "loss": _loss(params, test_images, test_labels),
      "accuracy": jnp.mean(right),
    }

  return gradient, evaluate


def init(seed: int) -> Any:
  """Initializes a network with one hidden layer of 64 units."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(
    rng.normal(0, shape[0] ** -0.5, shape), jnp.float32
  )
  return {
    "hidden": {"w": draw(64, _HIDDEN), "b": jnp.zeros(_HIDDEN)},
    "out": {"w": draw(_HIDDEN, 10), "b": jnp.zeros(10)},
  }


def _logits(params: Any, images: jax.Array) -> jax.Array:
  layer = lambda x, name: x @ params[name]["w"] + params[name]["b"][None]
  return layer(jax.nn.relu(layer(images, "hidden")), "out")


def _loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
  logits = _logits(params, images)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def run(
  strategies: Sequence[simulate.Strategy],
  latency: simulate.Latency,
  replicas: int,
  *,
  seconds: float,
  seed: int,
  learning_rate: float,
  progress: Callable[[float], None],
  **options: Any,
) -> list[Training]:
  """Trains with each strategy.

  Args:
    strategies: the strategies to compare.
    latency: latency of a gradient.
    replicas: number of replicas.
    seconds: virtual time.
    seed: seed of all random numbers.
    learning_rate: learning rate of plain gradient descent.
    progress: called with the number of finished strategies, and the fraction of
      the next one.
    **options: further arguments of `simulate_training`.

  Returns:
    The trainings.
  """
  gradient, evaluate = problem()
  optimizer = optax.sgd(learning_rate)
  trainings = []
  for i, strategy in enumerate(strategies):
    trainings.append(
      simulate.simulate_training(
        strategy,
        latency,
        replicas,
        params=init(seed),
        gradient=gradient,
        evaluate=evaluate,
        optimizer=optimizer,
        seconds=seconds,
        seed=seed,
        evaluations=30,
        progress=_from(progress, i),
        **options,
      )
    )
  return trainings


def _from(progress: Callable[[float], None], i: int) -> Callable[[float], None]:
  return lambda share: progress(i + share)


def show(title: str, trainings: Sequence[Training]) -> None:
  """Prints a line for each training.

  Args:
    title: the title of the table.
    trainings: one training per strategy.
  """
  shown = tables.table(title)
  shown.add_column("strategy", no_wrap=True)
  for name in (
    "steps",
    "staleness",
    "test loss",
    "test accuracy",
    "s to 80 %",
    "s to 90 %",
  ):
    shown.add_column(name, justify="right")
  for training in trainings:
    times = (training.time_to("accuracy", a) for a in (0.8, 0.9))
    shown.add_row(
      training.strategy.name,
      f"{training.steps[-1]:,}",
      f"{training.timing.mean_staleness:.3g}",
      f"{training.metrics['loss'][-1]:.3f}",
      f"{training.metrics['accuracy'][-1]:.1%}",
      *(f"{t:.4g}" if np.isfinite(t) else "-" for t in times),
    )
  tables.show(shown)


def report(training: Training) -> dict[str, Any]:
  """A training as plain numbers, for JSON; infinite values become null."""
  plain = lambda values: [float(x) if np.isfinite(x) else None for x in values]
  return {
    "strategy": training.strategy._asdict(),
    "seconds": training.times.tolist(),
    "steps": training.steps.tolist(),
    "metrics": {n: plain(v) for n, v in training.metrics.items()},
  }


def save(path: pathlib.Path, trainings: Sequence[Training], title: str) -> None:
  """Draws loss and accuracy against virtual time and saves them as PNG.

  Args:
    path: the output file.
    trainings: one training per strategy.
    title: the title of the figure.

  Raises:
    errors.CommandError: the file can't be written.
  """

  def panel(
    metric: str, factor: float, label: str
  ) -> Callable[[matplotlib.axes.Axes], None]:
    def draw(axes: matplotlib.axes.Axes) -> None:
      for training in trainings:
        axes.plot(
          training.times,
          factor * training.metrics[metric],
          label=training.strategy.name,
        )
      axes.set_xlabel("virtual seconds")
      axes.set_ylabel(label)
      axes.set_title(f"Test {metric}")

    return draw

  def accuracy(axes: matplotlib.axes.Axes) -> None:
    panel("accuracy", 100, "correct test images (%)")(axes)
    axes.legend(loc="lower right", fontsize=12)

  loss = panel("loss", 1, "cross-entropy (nats)")
  panels.save(path, title, [loss, accuracy])
