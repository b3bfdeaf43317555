"""The table of timings."""

from optax_dist import simulate
from optax_dist.cli.simulate import timing_table


def _timing(**options):
  return simulate.simulate_timing(
    simulate.sync_replicas(3),
    simulate.parse_latency("constant:2"),
    4,
    steps=100,
    **options,
  )


def test_a_line_for_each_and_only_categories_that_there_are(capsys):
  timing_table.show("both", [_timing(), _timing()])
  title, *lines = capsys.readouterr().out.splitlines()
  assert title.startswith("both")
  assert sum("sync, 3 of N" in line for line in lines) == 2
  assert "0.5" in lines[-3]
  assert "recovery" not in "".join(lines)


def test_failures_have_columns(capsys):
  failures = simulate.Failures(0.1, 1.0)
  timing_table.show("one", [_timing(failures=failures)])
  assert "recovery" in capsys.readouterr().out
