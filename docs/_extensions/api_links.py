"""Links each inline `name` of an API to its reference.

Pages name functions as code: `optax_dist.cross_shard`, `coordinator.join()`,
`jax.lax.pmean`. What this site or another one documents becomes a link there; a
name that nobody documents stays code.
"""

import dataclasses
import re

from docutils import nodes
from sphinx import addnodes

#: How pages shorten the names of modules.
SHORT = {
  "coordinator.": "optax_dist.coordinator.",
  "replica.": "optax_dist.coordinator.Replica.",
  "quorum.": "optax_dist.quorum.",
  "compression.": "optax_dist.compression.",
  "optimizers.": "optax_dist.optimizers.",
  "simulate.": "optax_dist.simulate.",
  "sparse.": "optax_dist.sparse.",
  "tensorflow1.": "optax_dist.tensorflow1.",
  "jnp.": "jax.numpy.",
  "np.": "numpy.",
  "nnx.": "flax.nnx.",
  "ocp.": "orbax.checkpoint.",
}
ELSEWHERE = ("jax.", "numpy.", "optax.", "flax.", "orbax.")
_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?", re.DOTALL)


def bare_names():
  """Returns the names that pages write without their module, with the full name."""
  import optax_dist
  from optax_dist import coordinator

  options = "optax_dist.coordinator.Options"
  fields = [field.name for field in dataclasses.fields(coordinator.Options)]
  return (
    # A plain word, such as `timeout`, may be anybody's.
    dict.fromkeys((name for name in fields if "_" in name), options)
    | {name: f"optax_dist.coordinator.{name}" for name in coordinator.__all__}
    | {name: f"optax_dist.{name}" for name in optax_dist.__all__}
  )


def target(text, bare):
  """Returns the full name that `text` names, or None.

  Args:
    text: What is written as code, such as `coordinator.join(tx, params)`.
    bare: What `bare_names` returns.
  """
  match = _NAME.fullmatch(text)
  if match is None:
    return None
  name = match[1]
  for short, full in SHORT.items():
    if name.startswith(short):
      return full + name.removeprefix(short)
  if name.startswith(("optax_dist.", *ELSEWHERE)):
    return name
  return bare.get(name)


def link(app, doctree):
  """Turns literals that name an API into references."""
  bare = bare_names()
  for literal in list(doctree.findall(nodes.literal)):
    parent = literal.parent
    # A heading's link would hide its anchor in the table of contents.
    if isinstance(
      parent, nodes.reference | addnodes.pending_xref | nodes.title
    ):
      continue
    name = target(literal.astext(), bare)
    if name is None:
      continue
    reference = addnodes.pending_xref(
      "",
      refdomain="py",
      reftype="obj",
      reftarget=name,
      refexplicit=True,
      refwarn=False,
      refdoc=app.env.current_document.docname,
    )
    parent.replace(literal, reference)
    reference += literal


def name_publicly(app, doctree, docname):
  """Shows the public name of an API, not its module's, where a link is pointed at."""
  for reference in doctree.findall(nodes.reference):
    if "._internal." in reference.get("reftitle", ""):
      anchor = reference.get("refid") or reference["refuri"].partition("#")[2]
      reference["reftitle"] = anchor


def setup(app):
  """Connects what is above."""
  app.connect("doctree-read", link)
  app.connect("doctree-resolved", name_publicly)
  return {"parallel_read_safe": True}
