"""What a replayed schedule prints; the files are behaviour."""

import pathlib

import pytest

from tests.simulation import faults
from tests.simulation.world import Setting

_DATA = pathlib.Path(__file__).parent / "testdata"

_SETTING = Setting(replicas=3, needed=2, steps=4, lower_on_loss=True)
_RUNS = {
  "all_stop": ((0.1605, "all stop", (0, 60.0)),),
  "coordinator_dies": ((0.1605, "kill coordinator", (0, 0.5)),),
}


@pytest.mark.parametrize("name", _RUNS)
def test_run_reproduces_its_transcript(name):
  schedule = faults.Schedule(7, _SETTING, _RUNS[name])
  result = faults.run(schedule, trace=True)
  assert not result.violation
  text = "\n".join(result.transcript) + "\n"
  assert text == (_DATA / f"{name}.txt").read_text()
