"""A command that would run nothing is an error."""

import pytest

from tests.chaos import __main__ as chaos
from tests.churn import __main__ as churn
from tests.mutants import __main__ as mutants
from tests.simulation import __main__ as simulation


@pytest.mark.parametrize(
  ("command", "arguments", "says"),
  [
    (chaos, "--only cut-host --seeds 9100:9103", "14, 29, 44"),
    (chaos, "--only cut-host --processes-per-replica 2", "of one process"),
    (chaos, "--seeds 3:3", "FIRST:END"),
    (churn, "--seeds 3:3", "FIRST:END"),
    (simulation, "--schedules 0", "nothing would run"),
    (simulation, "--planted nonsense", "no planted fault"),
    (simulation, "--bad --groups --leases", "no schedules with --groups --l"),
    (mutants, "optax_dist/quorum/rules.py --of nonsense", "nonsense"),
    (mutants, "optax_dist/quorum/rules.py --sample 0", "at least 1"),
  ],
)
def test_command_that_would_run_nothing_is_refused(
  capsys, command, arguments, says
):
  with pytest.raises(SystemExit) as ended:
    command.main(arguments.split())
  assert ended.value.code == 2
  assert says in capsys.readouterr().err
