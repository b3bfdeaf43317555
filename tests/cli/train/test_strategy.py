"""A strategy is one file: here one with parameters of each replica's own."""

import json
import textwrap

import matplotlib.image
import pytest

from optax_dist.cli import main
from optax_dist.cli.train import strategies, strategy

_PULL_TO_CENTER = '''
  """Replicas train apart; a pull holds them near their center."""

  from optax_dist.cli import errors
  from optax_dist.cli.train import strategy


  class PullToCenter(strategy.Strategy):

    summary = "replicas train apart and are pulled to their center"

    def add_arguments(self, group):
      group.add_argument("--pull", type=float, default=0.1, help="how strong")

    def check(self, args):
      if not 0 < args.pull < 1:
        raise errors.CommandError(f"--pull {args.pull} is not within 0 and 1")

    def build(self, run):
      import jax
      import jax.numpy as jnp
      import optax
      from jax.sharding import NamedSharding, PartitionSpec

      apart = PartitionSpec(run.axis_name)

      def init(params):
        state = params, run.optimizer.init(params)
        return jax.tree.map(lambda x: jnp.stack([x] * run.mesh.size), state)

      def replica_step(state, batch):
        params, inner = jax.tree.map(lambda x: x[0], state)
        loss, gradients = jax.value_and_grad(run.loss_fn)(params, batch)
        updates, inner = run.optimizer.update(gradients, inner, params)
        params = optax.apply_updates(params, updates)
        center = jax.lax.pmean(params, run.axis_name)
        away = optax.tree.sub(params, center)
        params = jax.tree.map(lambda p, a: p - run.args.pull * a, params, away)
        metrics = {"loss": loss, "distance": optax.tree.norm(away)}
        state = jax.tree.map(lambda x: x[None], (params, inner))
        return state, jax.lax.pmean(metrics, run.axis_name)

      step = jax.shard_map(
        replica_step,
        mesh=run.mesh,
        in_specs=(apart, apart),
        out_specs=(apart, PartitionSpec()),
      )

      def draw_distance(axes, records):
        axes.plot([record["distance"] for record in records])

      return strategy.Program(
        init=jax.jit(init, out_shardings=NamedSharding(run.mesh, apart)),
        step=jax.jit(step, donate_argnums=0),
        eval_params=lambda state: jax.tree.map(
          lambda x: x.mean(axis=0), state[0]
        ),
        summary=lambda records: [f"distance {records[-1]['distance']:.3f}"],
        panels=[draw_distance],
      )


  STRATEGY = PullToCenter()
'''


@pytest.fixture
def pull_to_center(tmp_path, monkeypatch):
  folder = tmp_path / "strategies"
  folder.mkdir()
  (folder / "pull_to_center.py").write_text(textwrap.dedent(_PULL_TO_CENTER))
  monkeypatch.setattr(
    strategies, "__path__", [*strategies.__path__, str(folder)]
  )


def test_every_file_is_a_strategy_with_help():
  assert "cross-shard" in strategies.names()
  for name in strategies.names():
    loaded = strategies.load(name)
    assert isinstance(loaded, strategy.Strategy)
    assert loaded.summary
    assert "\n" not in loaded.summary


@pytest.mark.usefixtures("pull_to_center")
def test_a_file_more_is_a_strategy_more(tmp_path, capsys):
  run = tmp_path / "run"
  argv = ["train", "--output", str(run), "--strategy", "pull-to-center"]
  short = ["--epochs", "1", "--replicas", "4"]
  assert main.main([*argv, *short, "--pull", "0.5"]) == 0
  out = capsys.readouterr().out
  lines = (run / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  assert all(record["distance"] > 0 for record in records)
  assert records[-1]["test_accuracy"] > 0.2
  assert f"distance {records[-1]['distance']:.3f}" in out.splitlines()
  height, width, _ = matplotlib.image.imread(run / "training.png").shape
  assert width / height == pytest.approx(3 * 6.2 / 4.9, abs=0.01)

  # Its check runs before anything slow, and its flags are its own.
  assert main.main([*argv, "--pull", "2"]) == 2
  assert "--pull 2.0 is not within" in capsys.readouterr().err
  assert main.main(["train", "--output", str(run), "--pull", "0.5"]) == 2
  assert "--pull" in capsys.readouterr().err


@pytest.mark.usefixtures("pull_to_center")
def test_help_shows_the_flags_of_all_strategies(capsys):
  for chosen in ([], ["--strategy", "pull-to-center"]):
    assert main.main(["train", "--help", *chosen]) == 0
    out = capsys.readouterr().out
    assert "--pull" in out
    assert "--reduction" in out
    assert "replicas train apart and are pulled" in out
