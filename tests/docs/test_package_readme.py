"""The README of the wheel and the sdist, as a package index shows it."""

import pathlib
import re
import tomllib

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\(([^)]+)\)")


def test_all_links_are_absolute_and_lead_to_files():
  core = ProjectMetadata(str(_ROOT), PluginManager()).core
  assert core.readme_content_type == "text/markdown"
  here = _LINK.findall((_ROOT / "README.md").read_text("utf-8"))
  there = _LINK.findall(core.readme)
  assert len(there) == len(here) > 20
  for link in there:
    assert link.startswith("https://"), link
  for link in here:
    if not link.startswith("https://"):
      assert (_ROOT / link.partition("#")[0]).exists(), link
  # A page of an image's file is no image.
  images = re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", core.readme)
  assert images
  assert all("/raw/main/" in image for image in images)


def test_the_sdist_has_the_readme_that_a_wheel_is_built_with():
  project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))
  included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
  assert "/README.md" in included
