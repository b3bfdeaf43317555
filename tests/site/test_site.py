"""The site, built: without a warning, its names linked, found by search.

Needs the extra ``[docs]``: skipped where Sphinx is not installed.
"""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip(
  "sphinx", reason="the site needs the extra: pip install optax-dist[docs]"
)
pytest.importorskip("myst_nb")
from optax_dist import optimizers

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  folder = tmp_path_factory.mktemp("site")
  flags = ["-q", "-W", "--keep-going", "-E", "-b", "html"]
  # Not here: Sphinx gives the functions that it documents other signatures.
  subprocess.run(
    [sys.executable, "-m", "sphinx", *flags, str(_DOCS), str(folder)],
    check=True,
  )
  return folder


def _links(page):
  """Returns (address, code) of each link around an inline name."""
  result = re.findall(
    r'<a class="reference \w+" href="([^"]*)"[^>]*><code[^>]*>(.*?)</code>',
    page.read_text("utf-8"),
    re.DOTALL,
  )
  return {re.sub("<[^>]*>", "", code): address for address, code in result}


def test_names_link_to_their_reference(site):
  links = _links(site / "coming_from_pmean_optax.html")
  assert links["cross_shard"] == "api/transforms.html#optax_dist.cross_shard"
  assert links["jax.shard_map"].startswith("https://docs.jax.dev/")
  links = _links(site / "coordinator.html")
  assert links["join"] == "api/coordinator.html#optax_dist.coordinator.join"
  assert links["silence_timeout"].endswith("coordinator.Options")


def _found(site, word):
  """Returns the pages that the site's search finds for a word."""
  script = (site / "searchindex.js").read_text("utf-8")
  index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)", script)[1])
  from sphinx.search.en import SearchEnglish

  stem = SearchEnglish({}).stem
  pages = [set() for _ in word.split()]
  for result, part in zip(pages, word.lower().split(), strict=True):
    for kind in ("terms", "titleterms"):
      hits = index[kind].get(stem(part), [])
      result |= set(hits if isinstance(hits, list) else [hits])
  return {index["docnames"][i] for i in set.intersection(*pages)}


@pytest.mark.parametrize(
  ("word", "page"),
  [
    ("fault tolerance", "coordinator"),
    ("preemption", "coordinator"),
    ("elastic training", "coordinator"),
    ("torchft", "comparison"),
    ("Horovod", "comparison"),
    ("FSDP", "sharded_models"),
    ("ZeRO", "sharded_models"),
    ("straggler", "sync_replicas"),
    ("DiLoCo", "local_updates"),
    ("parameter server", "coming_from_tensorflow1"),
  ],
)
def test_search_finds_the_page(site, word, page):
  assert page in _found(site, word)


def test_building_the_site_does_not_change_the_package(site):
  # As `optax.inject_hyperparams` reads it.
  beta1 = inspect.signature(optimizers.adam).parameters["beta1"]
  assert isinstance(beta1.default, float)
