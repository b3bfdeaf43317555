"""Latency and bandwidth from what replicas tell of their exchanges."""

import json

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.cli import main
from optax_dist.coordinator import journal
from optax_dist.simulate.network import moved
from optax_dist.simulate.replay.exchange import fit

# Of a run that is made up: messages, latency of an exchange, and seconds a byte.
MESSAGES, LATENCY, BYTE, COPY = 0.004, 0.01, 2e-9, 1e-9


def _records(
  nbytes, k=4, n=4, steps=60, *, inline=False, addresses="unix:x{}", seed=0
):
  """A run whose steps take what the numbers above say, but for some outliers."""
  rng = np.random.default_rng(seed)
  records = [
    {"kind": "run", "time": 0.0, "strategy": "sync_replicas", "step": 0,
     "replicas_to_aggregate": k, "max_staleness": 0, "gradient_bytes": nbytes}
  ]  # fmt: skip
  records += [
    {"kind": "join", "time": 0.0, "replica": i, "incarnation": i, "step": 0,
     "address": addresses.format(i)}
    for i in range(n)
  ]  # fmt: skip
  exchange = 0.0 if inline else LATENCY + BYTE * moved(nbytes, k)
  copy = 0.0005 + COPY * nbytes
  now = 0.0
  for step in range(steps):
    begin = now + (MESSAGES + exchange + copy if step else 0.0)
    compute = rng.uniform(0.05, 0.06, k)
    times = begin + compute
    outlier = 50.0 if step % 9 == 5 else 1.0
    members = [
      {"replica": i, "incarnation": i, "local_step": step, "count": 1,
       "staleness": 0, "weight": 1.0, "batches": None,
       "compute": float(compute[i]), "arrived": float(times[i]),
       "timings": {
         "start": begin, "sent": float(times[i]), "compiled": 0.0, "cpu": 0.0,
         "encoded": copy / 2, "applied": copy / 2 if step else 0.0,
         "waited": 0.1, "exchanged": exchange * outlier if step else 0.0,
       }}
      for i in range(k)
    ]  # fmt: skip
    now = float(times.max())
    records.append(
      {"kind": "commit", "time": now, "step": step, "attempt": 0,
       "members": members}
    )  # fmt: skip
  return records


def _write(path, records):
  with journal.Journal(path) as writer:
    for record in records:
      fields = {k: v for k, v in record.items() if k != "kind"}
      writer.write(record["kind"], **fields)
  return str(path)


def _fitted(*sizes, **options):
  first, *others = (_records(size, **options) for size in sizes)
  return simulate.from_journal(first, others)


def test_two_sizes_tell_latency_and_bandwidth_apart():
  recorded = _fitted(1_000_000, 8_000_000)
  found = recorded.exchange
  assert found.moving.seconds == pytest.approx(LATENCY, rel=1e-6)
  assert found.moving.per_byte == pytest.approx(BYTE, rel=1e-6)
  assert found.copying.per_byte == pytest.approx(COPY, rel=1e-6)
  assert found.messages.exchanged == pytest.approx(MESSAGES, rel=1e-3)
  assert found.network.latency == pytest.approx(LATENCY / 2)
  assert found.network.bandwidth == pytest.approx(1 / BYTE)
  assert not found.doubts(50e6)


@pytest.mark.parametrize(("nbytes", "members"), [(40e6, 4), (3e6, 2)])
def test_another_size_is_predicted(nbytes, members):
  recorded = _fitted(1_000_000, 8_000_000)
  expected = (
    MESSAGES + LATENCY + BYTE * moved(nbytes, members) + 0.0005 + COPY * nbytes
  )
  assert recorded.communication_of(members, nbytes) == pytest.approx(
    expected, rel=1e-3
  )
  pace = lambda **options: (
    simulate.predict(
      recorded, repetitions=4, steps=50, **options
    ).steps_per_second
  )
  more = 1 / pace(nbytes=40e6) - 1 / pace()
  assert more == pytest.approx(39e6 * (1.5 * BYTE + COPY), rel=0.02)


def test_recorded_gradients_take_what_was_recorded():
  recorded = _fitted(1_000_000)
  assert recorded.communication_of(4) == pytest.approx(recorded.communication)
  assert not recorded.exchange.doubts(1_000_000)


def test_one_size_is_a_doubt():
  found = _fitted(1_000_000).exchange
  (doubt,) = found.doubts(4e6)
  assert "gradients of one size" in doubt
  assert "4 times" in doubt
  assert found.moving.seconds == 0.0


def test_members_of_one_run_tell_apart_too():
  """With fewer replicas in a step each moves fewer bytes."""
  found = _fitted(1_000_000).exchange
  few, many = (found.seconds(members=k) for k in (2, 4))
  assert many - few == pytest.approx(0.5e6 * found.moving.per_byte)


def test_gradients_in_messages_are_not_those_that_are_exchanged():
  alone = _fitted(1000, inline=True).exchange
  assert alone.inline
  assert "will be exchanged" in alone.doubts(1e6)[0]
  assert alone.seconds(2000) == pytest.approx(alone.seconds(), rel=1e-6)
  both = simulate.from_journal(
    _records(1000, inline=True),
    [_records(1_000_000), _records(8_000_000)],
  ).exchange
  assert both.inline
  assert not both.doubts(4e6)
  assert both.seconds(4e6) == pytest.approx(
    MESSAGES + LATENCY + BYTE * 6e6 + 0.0005 + COPY * 4e6, rel=1e-2
  )
  assert "sent with the messages" in _fitted(1_000_000).exchange.doubts(10)[0]


def test_a_network_comes_on_top():
  found = _fitted(1_000_000, 8_000_000).exchange
  network = simulate.Network(0.02, 1e8)
  more = found.seconds(network=network) - found.seconds()
  # 2.8 round trips, and all bytes over the wire.
  assert more == pytest.approx(2.8 * 0.04 + 1.5e6 / 1e8)
  assert not found.doubts(network=network)
  apart = _fitted(1_000_000, addresses="10.0.0.{}:1").exchange
  assert "several hosts" in apart.doubts(network=network)[0]


def test_without_timings_nothing_is_guessed():
  records = _records(1_000_000)
  for record in records:
    for member in record.get("members", ()):
      member["timings"] = None
  recorded = simulate.from_journal(records)
  assert recorded.exchange is None
  assert recorded.communication_of(2) == recorded.communication
  with pytest.raises(ValueError, match="no timings"):
    recorded.communication_of(2, 1e6)
  with pytest.raises(ValueError, match="no timings"):
    simulate.predict(recorded, network=simulate.Network(1.0))


def test_a_fit_is_never_negative_and_ignores_outliers():
  rng = np.random.default_rng(0)
  times = {
    size: list((0.002 + 1e-9 * size) * rng.lognormal(0, 0.05, 99)) + [1e3] * 20
    for size in (1e5, 1e6, 1e7)
  }
  line = fit(times)
  assert line.seconds == pytest.approx(0.002, rel=0.1)
  assert line.per_byte == pytest.approx(1e-9, rel=0.1)
  # Larger ones that were faster say nothing of a negative cost.
  assert fit({1e6: [3.0], 1e7: [1.0]}).per_byte == 0.0
  assert fit({}).at(5.0) == 0.0


def test_plan_and_simulate_take_bytes_and_network(tmp_path, capsys):
  run = _write(tmp_path / "run.jsonl", _records(1_000_000))
  more = _write(tmp_path / "more.jsonl", _records(8_000_000))
  both = ["--journal", run, "--more-journals", more]
  out = tmp_path / "out.json"

  def seconds(*argv):
    command = ["simulate", *both, "--steps", "40", "--json", str(out)]
    assert main.main([*command, *argv]) == 0
    assert "several hosts" not in capsys.readouterr().err
    (found,) = json.loads(out.read_text())["communication"]
    return found

  more_bytes = seconds("--model-bytes", "40e6") - seconds()
  assert more_bytes == pytest.approx(39e6 * (1.5 * BYTE + COPY), rel=1e-3)
  slower = seconds("--network", "0.5,1e9") - seconds()
  assert slower == pytest.approx(2.8 + 1.5e6 / 1e9, rel=1e-3)

  def planned(*argv):
    command = ["plan", *both, "--steps", "40", "--repetitions", "20"]
    assert main.main([*command, "--json", str(out), *argv]) == 0
    capsys.readouterr()
    return json.loads(out.read_text())["recommended"]["steps_per_second"]

  assert planned("--network", "0.5,1e9") < 0.5 * planned()


def test_a_fleet_is_planned_from_a_journal(tmp_path, capsys):
  records = _records(1_000_000)
  end = records[-1]["time"]
  for at in (0.3, 0.6):  # Replica 3 is lost twice, and back a second later.
    where = next(
      i for i, r in enumerate(records) if r["time"] > at * end and i > 5
    )
    lost = {"time": records[where]["time"], "replica": 3, "step": 0}
    records[where + 1 : where + 1] = [
      lost | {"kind": "lost", "incarnation": 3, "reason": "silent"},
      lost
      | {"kind": "join", "incarnation": 9, "address": "unix:x"}
      | {"time": lost["time"] + 1.0},
    ]
  run = _write(tmp_path / "run.jsonl", records)
  more = _write(tmp_path / "more.jsonl", _records(8_000_000))
  out = tmp_path / "out.json"
  argv = ["plan", "--journal", run, "--more-journals", more, "--chips", "64"]
  argv += ["--periods", "20", "--repetitions", "2", "--json", str(out)]
  assert main.main(argv) == 0
  said = capsys.readouterr().out
  assert "recommended: " in said
  assert "runner-up: " in said
  fleet = json.loads(out.read_text())["fleet"]
  recorded = simulate.from_journal(records)
  assert fleet["failure_rate"] == pytest.approx(recorded.failures.rate / 8)
  assert fleet["repair"] == pytest.approx(1.0)
  assert fleet["nbytes"] == 1_000_000
  assert fleet["network"] == {
    "latency": pytest.approx(LATENCY / 2),
    "bandwidth": pytest.approx(1 / BYTE),
  }
  # What is given counts.
  assert main.main([*argv, "--repair", "7", "--chip-mtbf", "100"]) == 0
  fleet = json.loads(out.read_text())["fleet"]
  assert (fleet["repair"], fleet["failure_rate"]) == (7.0, 1 / 360_000)
