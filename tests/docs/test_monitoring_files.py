"""The dashboard and the alert rules of docs/monitoring ask for metrics that exist."""

import json
import pathlib
import re
import shutil
import subprocess
import time

import pytest
import yaml

from optax_dist.coordinator.metrics import prometheus
from optax_dist.coordinator.metrics.run_numbers import RunNumbers
from tests.docs import promql

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "monitoring"
# Series for each alert, in which it fires, and in which it doesn't.
_FIRE = pathlib.Path(__file__).with_name("alerts_fire.yaml")
_NAME = re.compile(r"\boptax_dist_\w+")


def _exposed():
  """The names of all time series that a port serves, with their labels."""
  result = {}
  for row in RunNumbers().metrics():
    name = f"optax_dist_{row.name}"
    if row.kind == "counter":
      name += "_total"
    endings = ("",)
    if row.kind == "histogram":
      endings = ("_bucket", "_sum", "_count")
    for ending in endings:
      result[name + ending] = {row.label} if row.label else set()
  return result


def _check(expressions):
  exposed = _exposed()
  for expression in expressions:
    names = _NAME.findall(expression)
    assert names, expression
    for name in names:
      assert name in exposed, name
    known = {label for name in names for label in exposed[name]} | {"job", "le"}
    used = re.findall(r"(\w+)=\"", expression)
    used += re.findall(r"by \((\w+)\)", expression)
    assert set(used) <= known, expression
    assert expression.count("(") == expression.count(")"), expression


def test_the_dashboard_shows_metrics_that_exist():
  dashboard = json.loads((_FOLDER / "grafana.json").read_text("utf-8"))
  targets = [t for panel in dashboard["panels"] for t in panel["targets"]]
  assert len(targets) > 8
  _check(target["expr"] for target in targets)
  ids = [panel["id"] for panel in dashboard["panels"]]
  assert len(set(ids)) == len(ids)


def test_the_alerts_watch_metrics_that_exist():
  rules = yaml.safe_load((_FOLDER / "alerts.yaml").read_text("utf-8"))
  alerts = [rule for group in rules["groups"] for rule in group["rules"]]
  assert len(alerts) > 4
  _check(alert["expr"] for alert in alerts)
  for alert in alerts:
    assert alert["annotations"]["summary"]


def test_each_alert_is_tested_firing_and_not_firing():
  rules = yaml.safe_load((_FOLDER / "alerts.yaml").read_text("utf-8"))
  alerts = {
    rule["alert"] for group in rules["groups"] for rule in group["rules"]
  }
  cases = yaml.safe_load(_FIRE.read_text("utf-8"))["tests"]
  checks = [check for case in cases for check in case["alert_rule_test"]]
  for fires in (True, False):
    result = {c["alertname"] for c in checks if bool(c["exp_alerts"]) is fires}
    assert result == alerts
  series = [s["series"] for case in cases for s in case["input_series"]]
  _check(series)


def _inverted(rule):
  """The rules that say the opposite, or part of it."""
  turned = {"<": ">", ">": "<", "absent(": "("}
  for match in re.finditer(r"[<>]|absent\(", rule["expr"]):
    text = rule["expr"]
    text = text[: match.start()] + turned[match[0]] + text[match.end() :]
    yield rule | {"expr": text}
  if "for" in rule:
    yield rule | {"for": "6h"}


def _wrong(rules):
  """The checks of `_FIRE` that fail with these rules, evaluated in Python."""
  tests = yaml.safe_load(_FIRE.read_text("utf-8"))
  every = promql.seconds(tests["evaluation_interval"])
  result = []
  for case in tests["tests"]:
    series = {
      s["series"]: promql.samples(s["values"], promql.seconds(case["interval"]))
      for s in case["input_series"]
    }
    for check in case["alert_rule_test"]:
      rule = rules[check["alertname"]]
      at = promql.seconds(check["eval_time"])
      fires = [
        dict(labels) | rule["labels"]
        for labels in promql.firing(rule, series, at, every)
      ]
      if fires != [alert["exp_labels"] for alert in check["exp_alerts"]]:
        result.append((case["name"], check["alertname"], check["eval_time"]))
  return result


def _rules():
  rules = yaml.safe_load((_FOLDER / "alerts.yaml").read_text("utf-8"))
  return {rule["alert"]: rule for g in rules["groups"] for rule in g["rules"]}


def test_alerts_fire_exactly_in_their_cases():
  assert _wrong(_rules()) == []


@pytest.mark.parametrize("name", _rules())
def test_inverted_alert_is_found(name):
  rules = _rules()
  turned = list(_inverted(rules[name]))
  assert turned
  for rule in turned:
    assert name in {wrong[1] for wrong in _wrong(rules | {name: rule})}, rule


@pytest.mark.parametrize(
  ("end", "fires"),
  [
    # Killed with SIGKILL after five minutes, with all that write its journal.
    ("dead", {"OptaxDistSilent", "OptaxDistNoCommit"}),
    ("finished", set()),
    ("failed", {"OptaxDistFailed"}),
    ("going on", set()),
  ],
)
def test_alerts_fire_for_the_numbers_of_a_dead_job(monkeypatch, end, fires):
  numbers, series = RunNumbers(), {}
  now = 0.0
  monkeypatch.setattr(time, "monotonic", lambda: now)
  numbers.update([{"kind": "run", "time": 0.0, "step": 0}])
  replicas = range(4)
  numbers.update({"kind": "join", "time": 0.0, "replica": r} for r in replicas)
  member = {"count": 1, "staleness": 0, "compute": 29.0, "age": 0.5}
  for step in range(84):
    now = 30.0 * step
    if step <= 10 or end == "going on":
      members = [member | {"replica": r} for r in replicas]
      commit = {"kind": "commit", "step": step, "time": now}
      numbers.update([commit | {"members": members}])
    elif step == 11 and end in ("finished", "failed"):
      finish = {"kind": "finish", "time": now, "reason": end}
      counts = {"applied": 44, "dropped": {}} if end == "finished" else None
      numbers.update([finish | {"ledger": counts}])
    for line in prometheus.text(numbers.metrics()).splitlines():
      if not line.startswith("#"):
        name, _, value = line.rpartition(" ")
        series.setdefault(name, []).append((now, float(value)))
  result = {
    name
    for name, rule in _rules().items()
    if promql.firing(rule, series, 2490.0, 30.0)
  }
  assert result == fires


@pytest.mark.skipif(
  shutil.which("promtool") is None,
  reason="needs promtool, of Debian's package prometheus",
)
def test_promtool_agrees(tmp_path):
  rules = _rules()
  cases = [
    rules,
    *(
      rules | {name: turned}
      for name, rule in rules.items()
      for turned in _inverted(rule)
    ),
  ]
  files = [f"{number}/{_FIRE.name}" for number in range(len(cases))]
  for case, file in zip(cases, files, strict=True):
    path = tmp_path / file
    path.parent.mkdir()
    shutil.copy(_FIRE, path)
    group = {"name": "optax-dist", "rules": list(case.values())}
    text = yaml.safe_dump({"groups": [group]})
    path.with_name("alerts.yaml").write_text(text)
  ran = subprocess.run(
    ["promtool", "test", "rules", *files],
    cwd=tmp_path,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  _, *results = ran.stdout.split("Unit Testing:")
  for case, result in zip(cases, results, strict=True):
    assert ("SUCCESS" in result) is (_wrong(case) == []), result
