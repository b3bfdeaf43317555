"""The dashboard and the alert rules of docs/monitoring ask for metrics that exist."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from optax_dist.coordinator.metrics.run_numbers import RunNumbers

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "monitoring"
# Series for each alert, in which it fires, and in which it doesn't.
_FIRE = pathlib.Path(__file__).with_name("alerts_fire.yaml")
_NAME = re.compile(r"\boptax_dist_\w+")


def _exposed():
  """The names of all time series that a port serves, with their labels."""
  found = {}
  for row in RunNumbers().metrics():
    name = f"optax_dist_{row.name}"
    if row.kind == "counter":
      name += "_total"
    endings = ("",)
    if row.kind == "histogram":
      endings = ("_bucket", "_sum", "_count")
    for ending in endings:
      found[name + ending] = {row.label} if row.label else set()
  return found


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


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
  rules = yaml.safe_load((_FOLDER / "alerts.yaml").read_text("utf-8"))
  alerts = {
    rule["alert"] for group in rules["groups"] for rule in group["rules"]
  }
  cases = yaml.safe_load(_FIRE.read_text("utf-8"))["tests"]
  checks = [check for case in cases for check in case["alert_rule_test"]]
  for fires in (True, False):
    found = {c["alertname"] for c in checks if bool(c["exp_alerts"]) is fires}
    assert found == alerts
  series = [s["series"] for case in cases for s in case["input_series"]]
  _check(series)


@pytest.mark.skipif(
  shutil.which("promtool") is None,
  reason="needs promtool, of Debian's package prometheus",
)
def test_alerts_fire_when_they_should(tmp_path):
  for path in (_FOLDER / "alerts.yaml", _FIRE):
    shutil.copy(path, tmp_path)
  command = ["promtool", "test", "rules", _FIRE.name]
  ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
  assert ran.returncode == 0, ran.stdout + ran.stderr
