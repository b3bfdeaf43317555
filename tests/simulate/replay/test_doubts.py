"""Each doubt about a journal is a line that names what is missing."""

from optax_dist.simulate.replay import doubts, failures, turns

RUN = {"kind": "run", "time": 0.0, "cores": 2}


def _join(replica, address):
  return {"kind": "join", "time": 0.0, "replica": replica, "address": address}


def _commit(cpu, replicas=2, compute=1.0):
  members = [
    {
      "replica": i,
      "local_step": 0,
      "arrived": 1.0,
      "compute": compute,
      "timings": {"start": 0.0, "sent": 1.0, "cpu": cpu, "compiled": 0.0},
    }
    for i in range(replicas)
  ]
  return {"kind": "commit", "time": 1.0, "step": 0, "members": members}


def _said(records, faults=(), cancelled=False):
  found = list(turns.of(records))
  return doubts.of(records, found, faults, cancelled)


def test_replicas_that_share_cores_are_outside_the_model():
  joins = [_join(i, f"10.0.0.1:{i}") for i in range(2)]
  busy = [RUN, *joins, *[_commit(0.95)] * 40]
  (line,) = _said(busy)
  assert line.startswith("outside the model: 2 replicas on one host keep 1.9")
  assert _said([RUN, *joins, *[_commit(0.5)] * 40]) == ()
  # Each on a separate host.
  apart = [_join(i, f"10.0.0.{i}:7") for i in range(2)]
  assert _said([RUN, *apart, *[_commit(0.95)] * 40]) == ()
  # Threads of a process: each has counted all of it.
  threads = [_join(i, f"in-process:{i}") for i in range(2)]
  assert _said([RUN, *threads, *[_commit(0.95)] * 40]) == ()
  assert _said([RUN, *threads, *[_commit(1.95)] * 40]) != ()


def test_other_work_on_the_host_is_outside_the_model():
  ran = [RUN, _join(0, "h:1"), *[_commit(0.5, 1)] * 40]
  end = {"kind": "finish", "time": 2.0, "step": 40}
  (line,) = _said([*ran, end | {"load": 19.0}])
  assert line.startswith("outside the model: a load of 19.0 on 2 cores")
  # No other programs, or unknown.
  assert _said([*ran, end | {"load": 4.4}]) == ()
  assert _said([*ran, end | {"load": None}]) == ()
  assert _said([*ran, end]) == ()


def test_what_is_missing_is_named():
  few = _said([RUN, _commit(0.1)])
  assert few[0].startswith("too short: 1 steps, where 30")
  silent = [RUN, _join("c", "h:1"), *[_commit(0.1)] * 40]
  assert "no time of computing of replica c" in _said(silent)[0]
  old = _commit(0.1)
  for member in old["members"]:
    del member["timings"]
  assert "no timings" in _said([RUN, *[old] * 40])[0]
  assert (
    "slow computations are missing"
    in _said([RUN, *[_commit(0.1)] * 40], cancelled=True)[0]
  )


def test_few_failures_leave_much_doubt():
  fault = failures.Fault(0, 1.0, "killed", 0.0, 2.0, 0.0)
  records = [RUN, *[_commit(0.1)] * 40]
  (line,) = _said(records, [fault])
  assert "1 loss tells" in line
  assert "from 0.18 to 39 times" in line
  assert _said(records, [fault] * 10) == ()
