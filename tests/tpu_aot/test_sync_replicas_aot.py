"""Tests of what a training step with sync_replicas becomes on TPU, without one."""

import itertools
import re

import aot
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

_TOPOLOGY = "v5e:16x16"
_CHIPS = 256
_WIDTHS = [256] * 7
_BATCH = 64
_INNER = optax.sgd(0.1, momentum=0.9)


def _loss(params, x):
  for w, b in params:
    x = jnp.tanh(x @ w + b[None])
  return jnp.mean(jnp.square(x))


def _compiled(tx, check_vma=True):
  """Compiles a training step; ``tx`` of None stands for pmean by hand."""
  by_hand = tx is None
  tx = _INNER if by_hand else tx
  over = aot.mesh(_TOPOLOGY)
  params = [
    (
      jax.ShapeDtypeStruct((n, m), jnp.float32),
      jax.ShapeDtypeStruct((m,), jnp.float32),
    )
    for n, m in itertools.pairwise(_WIDTHS)
  ]
  state = jax.eval_shape(tx.init, params)
  specs = (P(), optax_dist.states.state_specs(state, aot.AXIS), P(aot.AXIS))

  def step(params, state, x):
    gradients = jax.grad(_loss)(optax_dist.local_params(params, aot.AXIS), x)
    if by_hand:
      gradients = jax.lax.pmean(gradients, aot.AXIS)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  run = jax.shard_map(
    step,
    mesh=over,
    in_specs=specs,
    out_specs=specs[:2],
    check_vma=check_vma,
  )
  x = jax.ShapeDtypeStruct((_BATCH * over.size, _WIDTHS[0]), jnp.float32)
  place = lambda spec, part: jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(over, spec)
    ),
    part,
  )
  args = jax.tree.map(
    place, specs, (params, state, x), is_leaf=lambda s: isinstance(s, P)
  )
  return jax.jit(run, donate_argnums=(0, 1)).lower(*args).compile()


def _sync(**kwargs):
  return optax_dist.sync_replicas(
    _INNER, aot.AXIS, total_num_replicas=_CHIPS, **kwargs
  )


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("all_arrive", [False, True])
def test_sync_replicas_has_one_all_reduce_as_pmean_has(all_arrive, check_vma):
  """By default a count is communicated too: it rides in the same all-reduce."""
  tx = _sync(replicas_to_aggregate=_CHIPS, all_arrive=all_arrive)
  ours = _compiled(tx, check_vma)
  by_hand = _compiled(None, check_vma)
  expected = aot.count_collectives(by_hand.as_text())
  assert expected == {"all-reduce": 1}
  assert aot.count_collectives(ours.as_text()) == expected
  if all_arrive:
    # What is more than by hand is a handful of counters.
    assert aot.temporaries(ours) <= aot.temporaries(by_hand) + 2**14


def _computations(text):
  """Returns the lines of each computation by name, and the entry's name."""
  result = re.findall(
    r"^(ENTRY )?%([\w.-]+) \(.*?\{$\n(.*?)^\}", text, re.MULTILINE | re.DOTALL
  )
  entry = next(name for is_entry, name, _ in result if is_entry)
  return {name: body.splitlines() for _, name, body in result}, entry


_CALL = (
  r"(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%[\w.-]+)"
)


def _reached(computations, start, into_branches):
  """Returns the lines of all that runs from ``start`` on."""
  lines, todo, seen = [], [start], set()
  while todo:
    name = todo.pop()
    if name in seen:
      continue
    seen.add(name)
    for line in computations[name]:
      lines.append(line)
      for kind, names in re.findall(_CALL, line):
        if kind != "branch_computations" or into_branches:
          todo += re.findall(r"%([\w.-]+)", names)
  return lines


def _collectives(lines):
  return aot.count_collectives("\n".join(lines))


def test_collectives_in_branches_are_counted_apart_from_the_others():
  text = """
%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%a, %b)
}

%wait.1 (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}

%apply.2 (x.1: f32[8]) -> f32[8] {
  ROOT %all-reduce = f32[8]{0} all-reduce(%x.1), to_apply=%sum
}

ENTRY %main (p: pred[], y: f32[8]) -> f32[8] {
  %call = f32[8]{0} fusion(%y), kind=kLoop, calls=%wait.1
  ROOT %c = f32[8]{0} conditional(%p, %y, %y), \
branch_computations={%wait.1, %apply.2}
}
"""
  computations, entry = _computations(text)
  assert entry == "main"
  assert set(computations) == {"sum", "wait.1", "apply.2", "main"}
  assert _collectives(_reached(computations, entry, False)) == {}
  assert _collectives(_reached(computations, entry, True)) == {"all-reduce": 1}
  assert _collectives(_reached(computations, "wait.1", True)) == {}
  # Without the conditional it would be seen.
  always, entry = _computations(text.replace("calls=%wait.1", "calls=%apply.2"))
  assert _collectives(_reached(always, entry, False)) == {"all-reduce": 1}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("all_arrive", [False, True])
def test_accumulation_communicates_nothing(all_arrive, check_vma):
  tx = _sync(replicas_to_aggregate=4 * _CHIPS, all_arrive=all_arrive)
  text = _compiled(tx, check_vma).as_text()
  computations, entry = _computations(text)
  always = _reached(computations, entry, False)
  assert len(always) > 100
  assert _collectives(always) == {}
  (line,) = [line for line in always if " conditional(" in line]
  branches = re.search(r"branch_computations=\{%(.*?), %(.*?)\}", line)
  # XLA numbers the branches by the predicate: first the one for false.
  wait, apply = (
    _reached(computations, name, True) for name in branches.groups()
  )
  assert _collectives(wait) == {}
  assert _collectives(apply) == {"all-reduce": 1}
  assert aot.count_collectives(text) == {"all-reduce": 1}
