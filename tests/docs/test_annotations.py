"""Every public signature is annotated whole, and the package says so."""

import importlib
import importlib.resources
import inspect
import pkgutil

import optax_dist

_MODULES = [
  optax_dist,
  *(
    importlib.import_module(module.name)
    for layer in (
      "compression",
      "ledger",
      "optimizers",
      "quorum",
      "simulate",
      "sparse",
      "states",
      "tensorflow1",
      "transforms",
    )
    for module in pkgutil.walk_packages(
      [f"{optax_dist.__path__[0]}/{layer}"], f"optax_dist.{layer}."
    )
    if "._" not in module.name
  ),
]


def _callables():
  """Each public function, and method of a public class, by its full name."""
  result = {}
  for module in _MODULES:
    for name, value in vars(module).items():
      where = getattr(value, "__module__", "")
      if name.startswith("_") or where != module.__name__:
        continue
      if inspect.isfunction(value):
        result[f"{where}.{name}"] = value
      elif inspect.isclass(value):
        result |= {
          f"{where}.{name}.{key}": method
          for key, method in vars(value).items()
          if inspect.isfunction(method)
          and method.__module__ == where
          and (key == "__init__" or not key.startswith("_"))
        }
  return result


_FOUND = _callables()


def test_the_public_functions_are_found():
  assert "optax_dist.transforms.cross_shard.cross_shard" in _FOUND
  assert "optax_dist.optimizers.adam.adam" in _FOUND
  assert len(_FOUND) > 100


def _not_annotated(name, function):
  """The full names of parameters without an annotation, and of the result."""
  signature = inspect.signature(function)
  missing = [
    parameter.name
    for parameter in signature.parameters.values()
    if parameter.annotation is parameter.empty
    and parameter.name not in ("self", "cls")
  ]
  if not name.endswith("__init__"):
    missing += ["return"] * (signature.return_annotation is signature.empty)
  return [f"{name}: {parameter}" for parameter in missing]


def test_public_signatures_are_annotated():
  missing = []
  for name, function in sorted(_FOUND.items()):
    missing += _not_annotated(name, function)
  assert not missing


def test_a_missing_annotation_is_found():
  def half(x: int, y, *, z=1):
    return x

  assert _not_annotated("half", half) == ["half: y", "half: z", "half: return"]


def test_the_package_is_marked_as_typed():
  files = importlib.resources.files("optax_dist")
  assert files.joinpath("py.typed").is_file()
