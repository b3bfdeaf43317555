"""Options: which deadlines follow what is seen, and which are given."""

import numpy as np
import pytest

from optax_dist.coordinator.options import Options
from optax_dist.coordinator.protocol import deadlines
from optax_dist.coordinator.transport import interface


def test_default_deadlines_follow_observed_times():
  options = Options()
  assert options.silence == deadlines.silence(300.0)
  assert options.steps == deadlines.steps(300.0)


def test_explicit_timeouts_are_used():
  options = Options(silence_timeout=2.0, transfer_timeout=3.0, step_timeout=4.0)
  assert options.silence == interface.fixed(2.0)
  assert options.steps == interface.fixed(4.0)


@pytest.mark.parametrize("name", ["timeout", "transfer_timeout"])
def test_options_out_of_range_are_refused_by_name(name):
  with pytest.raises(ValueError, match=name):
    Options(**{name: 0.0})
  with pytest.raises(ValueError, match="transfer_timeout` must be at most"):
    Options(timeout=5.0, transfer_timeout=6.0)


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("timeout", None),
    ("timeout", "3"),
    ("timeout", True),
    ("timeout", float("inf")),  # No clock can wait for that.
    ("timeout", float("nan")),
    ("transfer_timeout", "3"),
    ("silence_timeout", float("inf")),
    ("silence_timeout", 1e-6),  # The event loop would do nothing else.
    ("step_timeout", "3"),
    ("stall_warning", None),
    ("stall_warning", -1),
    ("stall_warning", 0.0),  # The event loop would do nothing else.
    ("inline_bytes", 1.5),
    ("inline_bytes", None),
    ("inline_bytes", 1 << 20),  # A store would take one in a record, at most.
    ("fingerprint_every", 1.5),
    ("fingerprint_every", True),
    ("journal", 3),
    ("journal", ""),
    ("config", None),
    ("run", None),
    # Bytes of another encoding, as Python has them.
    ("journal", "caf\udce9.jsonl"),
    ("run", "caf\udce9"),
  ],
)
def test_options_of_another_type_are_refused_by_name(name, value):
  with pytest.raises(ValueError, match=f"`{name}` must be ") as error:
    Options(**{name: value})
  assert repr(value) in str(error.value)


def test_numbers_of_numpy_are_numbers():
  settings = Options(timeout=np.float32(5), inline_bytes=np.int64(7))
  assert (settings.timeout, settings.inline_bytes) == (5, 7)
