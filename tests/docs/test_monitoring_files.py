"""The dashboard and the alert rules of docs/monitoring ask for metrics that exist."""

import json
import pathlib
import re

import yaml

from optax_dist.coordinator.metrics.run_numbers import RunNumbers

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "monitoring"
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
