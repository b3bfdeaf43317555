"""Alert rules of Prometheus, evaluated: the forms of PromQL that docs/monitoring has.

Comparisons of series, `and`, sums and quotients, `sum`, `rate`, `increase`, `absent`,
and `for`. `promtool test rules` is the original; a test compares them where it is
installed.
"""

import operator
import re

_LOOKBACK = 300.0
_UNITS = {"s": 1, "m": 60, "h": 3600}
_TOKEN = re.compile(
  r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-z_]+)|(?P<labels>\{[^}]*\})"
  r"|(?P<range>\[\w+\])|(?P<sign>[()<>/+]))"
)
_BINARY = (
  {"and": None},
  {"<": operator.lt, ">": operator.gt},
  {"+": operator.add},
  {"/": operator.truediv},
)


def seconds(text):
  """Such as "1m" or "30s"."""
  return int(text[:-1]) * _UNITS[text[-1]]


def samples(values, interval):
  """The samples of a series as promtool writes it, such as "0+2x10 _x5 7"."""
  result = []
  for word in values.split():
    match = re.fullmatch(r"(_|[\d.]+)(?:\+([\d.]+))?(?:x(\d+))?", word)
    first, step, times = match.groups()
    for i in range(int(times or 0) + (first != "_")):
      if first != "_":
        result.append(float(first) + i * float(step or 0))
      else:
        result.append(None)
  return [(i * interval, v) for i, v in enumerate(result) if v is not None]


def _labels(text):
  return frozenset(re.findall(r'(\w+)="([^"]*)"', text))


class _Query:
  """An expression at a time, as a dict of values by labels, or a number."""

  def __init__(self, series, text, now):
    self._series, self._now = series, now
    self._tokens = [
      (m.lastgroup, m[m.lastgroup]) for m in _TOKEN.finditer(text)
    ]
    assert "".join(t for _, t in self._tokens) == re.sub(r"\s", "", text), text

  def value(self, level=0):
    if level == len(_BINARY):
      return self._single()
    left = self.value(level + 1)
    while self._tokens and self._tokens[0][1] in _BINARY[level]:
      sign = self._tokens.pop(0)[1]
      left = _combined(sign, _BINARY[level][sign], left, self.value(level + 1))
    return left

  def _single(self):
    kind, text = self._tokens.pop(0)
    if kind == "number":
      return float(text)
    if text != "(" and self._next() != "(":
      return self._latest(text)
    if text != "(":
      self._tokens.pop(0)
    if text in ("rate", "increase"):
      result = self._growth(text, self._tokens.pop(0)[1])
    else:
      result = self.value()
      if text == "sum":
        result = {frozenset(): sum(result.values())} if result else {}
      elif text == "absent":
        result = {} if result else {frozenset(): 1.0}
      else:
        assert text == "("
    assert self._tokens.pop(0)[1] == ")"
    return result

  def _next(self):
    return self._tokens[0][1] if self._tokens else ""

  def _named(self, name):
    wanted = frozenset()
    if self._tokens and self._tokens[0][0] == "labels":
      wanted = _labels(self._tokens.pop(0)[1])
    return {
      _labels(key): values
      for key, values in self._series.items()
      if key.partition("{")[0] == name and wanted <= _labels(key)
    }

  def _latest(self, name):
    result = {}
    for key, values in self._named(name).items():
      recent = [v for t, v in values if 0 <= self._now - t < _LOOKBACK]
      result |= {key: recent[-1]} if recent else {}
    return result

  def _growth(self, function, name):
    """Extrapolated to the whole range, like Prometheus."""
    result, named = {}, self._named(name)
    length = seconds(self._tokens.pop(0)[1][1:-1])
    for key, values in named.items():
      inside = [(t, v) for t, v in values if 0 <= self._now - t < length]
      if len(inside) > 1:
        (first, low), (last, high) = inside[0], inside[-1]
        mean = (last - first) / (len(inside) - 1)
        ends = [first - (self._now - length), self._now - last]
        more = sum(e if e < 1.1 * mean else mean / 2 for e in ends)
        grown = (high - low) * (1 + more / (last - first))
        result[key] = grown / (length if function == "rate" else 1)
    return result


def _combined(sign, function, left, right):
  if sign == "and":
    return {key: v for key, v in left.items() if key in right}
  pairs = {
    key: (v, right if isinstance(right, float) else right.get(key))
    for key, v in left.items()
  }
  pairs = {key: p for key, p in pairs.items() if p[1] is not None}
  if sign in "<>":
    return {key: p[0] for key, p in pairs.items() if function(*p)}
  return {
    key: function(*p) if p[1] or sign != "/" else float("nan")
    for key, p in pairs.items()
  }


def firing(rule, series, until, every):
  """The labels and values with which an alert fires at a time, as a dict.

  Args:
    rule: an alert of the rules' file.
    series: samples by series.
    until: the time, in seconds.
    every: from one evaluation of the rule to the next.
  """
  needed, since, result = seconds(rule.get("for", "0s")), {}, {}
  for now in range(0, int(until) + 1, int(every)):
    result = _Query(series, rule["expr"], now).value()
    since = {key: since.get(key, now) for key in result}
  return {k: v for k, v in result.items() if until - since[k] >= needed}
