"""How Sphinx makes the site: `sphinx-build -W -b html docs docs/_build/html`."""

import pathlib
import re
import sys

import optax_dist

_ROOT = pathlib.Path(__file__).resolve().parents[1]

#: Where links go that leave docs/, such as those to a benchmark's source.
REPOSITORY = "https://github.com/optax-dist/optax-dist"

sys.path.insert(0, str(_ROOT / "docs" / "_extensions"))

project = "optax-dist"
author = "The optax-dist authors"
copyright = author
version = release = optax_dist.__version__

extensions = [
  "api_links",
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.intersphinx",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
]
exclude_patterns = [
  "_build",
  "jupyter_execute",
  "images/*.py",
  "**/.ipynb_checkpoints",
]

# Notebooks are shown with their committed outputs; tests/notebooks runs them.
nb_execution_mode = "off"
nb_execution_cache_path = str(_ROOT / "docs/_build/.jupyter_cache")
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4

#: Other sites. Without a network their few names in _inventories/ have to do.
intersphinx_mapping = {
  name: (address, (None, f"_inventories/{name}.inv"))
  for name, address in {
    "flax": "https://flax.readthedocs.io/en/latest/",
    "jax": "https://docs.jax.dev/en/latest/",
    "numpy": "https://numpy.org/doc/stable/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "orbax": "https://orbax.readthedocs.io/en/latest/",
  }.items()
}
intersphinx_timeout = 10

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Their types name modules that are not public.
napoleon_attr_annotations = False
add_module_names = False
# Some docstrings have `names` in single backticks.
default_role = "code"

html_theme = "sphinx_book_theme"
html_title = "optax-dist"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {
  "repository_url": REPOSITORY,
  "path_to_docs": "docs",
  "use_repository_button": True,
  "use_download_button": False,
  "use_fullscreen_button": False,
  "show_toc_level": 2,
  "show_navbar_depth": 1,
  "navbar_persistent": [],
}
copybutton_exclude = ".linenos, .gp, .go"


def _link_to_the_repository(app, docname, source):
  """Leads a page's links to files outside of docs/ to the repository."""
  folder = pathlib.Path(app.env.doc2path(docname)).parent

  def address(match):
    file = (folder / match[1]).resolve()
    if not file.exists():
      return match[0]  # Sphinx says where.
    kind = "tree" if file.is_dir() else "blob"
    path = file.relative_to(_ROOT).as_posix()
    return f"]({REPOSITORY}/{kind}/main/{path}"

  if folder == _ROOT / "docs":
    source[0] = re.sub(r"\]\((\.\./[^)#]+)", address, source[0])


def _skip_fields(app, what, name, obj, skip, options):
  """Leaves out a NamedTuple's fields, which its docstring tells already."""
  doc = getattr(obj, "__doc__", None) or ""
  return True if doc.startswith("Alias for field number") else None


def setup(app):
  """Connects what is above."""
  app.connect("source-read", _link_to_the_repository)
  app.connect("autodoc-skip-member", _skip_fields)
