import time

import pytest

from optax_dist.coordinator import polling


def _wait_for_ever(wait):
  while True:
    wait.pause()


def test_pauses_grow_and_end_at_the_deadline(monkeypatch):
  now, pauses = [100.0], []

  def sleep(seconds):
    pauses.append(seconds)
    now[0] += seconds

  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  monkeypatch.setattr(time, "sleep", sleep)
  wait = polling.Polling(0.5)
  with pytest.raises(TimeoutError, match=r"not within 0\.5 s"):
    _wait_for_ever(wait)
  assert now[0] == pytest.approx(100.5)
  assert pauses[:-1] == sorted(pauses[:-1])
  assert pauses[0] == pytest.approx(20e-6)
  assert max(pauses) == pytest.approx(1e-3)


def test_it_asks_now_and_then_whether_it_is_cancelled(monkeypatch):
  now, asked = [0.0], []
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  monkeypatch.setattr(
    time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds)
  )

  def cancelled():
    asked.append(now[0])
    return len(asked) == 3

  wait = polling.Polling(10.0, cancelled)
  with pytest.raises(TimeoutError, match="cancelled"):
    _wait_for_ever(wait)
  assert asked == pytest.approx([0.02, 0.04, 0.06], abs=0.005)


def test_no_time_is_no_pause():
  with pytest.raises(TimeoutError, match="not within 0 s"):
    polling.Polling(0.0).pause()
