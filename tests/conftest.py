"""Test set-up: 8 CPU devices, strict dtype promotion, no work left pending."""

import collections
import gc
import itertools
import os
import pathlib
import shutil
import signal
import tempfile

# A shell has what it starts in the background ignore Ctrl-C, and so would the
# processes of tests that are to be ended by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run on CPU devices, wherever they run: a machine with one accelerator
# could not hold the 8-device tier.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Else each of the hundreds of processes that tests start would compile the whole
# package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import compiling
import hosts
import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
compiling.quickly()
# Tracing makes many objects that live on, and each collection looks at all.
gc.set_threshold(100_000, 50, 50)

# Compilation makes first examples slow, so a per-example deadline would only
# measure the compiler; derandomised runs fail for everyone or for nobody.
hypothesis.settings.register_profile(
  "repository", deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("repository")


def pytest_addoption(parser):
  parser.addoption(
    "--scenarios",
    help="a file of TensorFlow's recordings to replay in place of"
    " tests/scenarios/scenarios.json",
  )


def pytest_configure(config):
  # Read when tests are collected, in workers of xdist too.
  if config.getoption("--scenarios"):
    os.environ["OPTAX_DIST_SCENARIOS"] = os.path.abspath(
      config.getoption("--scenarios")
    )
  _keep_what_is_compiled(config)


_COMPILED = pytest.StashKey[str]()


def _keep_what_is_compiled(config):
  """Has all processes of this run keep compiled programs in files, until it ends.

  Compiling takes most of the time of the tests, and many make the same program
  from functions of their own, where only the program itself can be recognized.
  """
  folder = getattr(config, "workerinput", {}).get("compiled")
  if folder is None:
    folder = tempfile.mkdtemp()
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
  config.stash[_COMPILED] = folder
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
  """Tells a worker of xdist where programs are kept."""
  node.workerinput["compiled"] = node.config.stash[_COMPILED]


# Where tests wait for processes, clocks and networks more than they compute.
_WAITING = (
  "tests/chaos",
  "tests/cli/launch",
  "tests/coordinator/extras",
  "tests/coordinator/launch",
  "tests/coordinator/runs",
  "tests/coordinator/runtime",
  "tests/coordinator/transport",
  "tests/examples",
  "tests/processes",
)
# Other files with few tests that take minutes: what begins last ends last.
_LONG = ("tests/docs", "tests/simulation", "tests/transforms")


def pytest_collection_modifyitems(items):
  """Orders files, which xdist gives out in this order.

  One that waits and one that computes in turn: more processes than cores run tests,
  and so there is always something to compute.
  """
  files = collections.defaultdict(list)
  for item in items:
    files[item.nodeid.partition("::")[0]].append(item)
  waiting = [file for file in files if file.startswith(_WAITING)]
  waiting.sort(key=lambda file: not file.startswith("tests/examples"))
  computing = [file for file in files if file not in waiting]
  computing.sort(key=lambda file: not file.startswith(_LONG))
  pairs = itertools.zip_longest(waiting, computing)
  order = itertools.chain.from_iterable(pairs)
  items[:] = [item for file in order if file for item in files[file]]


@pytest.fixture(autouse=True)
def separate_temporary_folder(monkeypatch, tmp_path_factory):
  """Otherwise a coordinator continues the log of another test that had its port."""
  tmp_path_factory.getbasetemp()  # It outlives this test.
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield


def pytest_runtest_setup(item):
  if item.get_closest_marker("namespaces") and hosts.not_permitted():
    pytest.skip(f"needs network namespaces: {hosts.not_permitted()}")


def pytest_terminal_summary(terminalreporter):
  """Reports how many tests between hosts ran, so that zero is noticed."""
  ran, reasons = 0, []
  for kind in ("passed", "failed", "skipped"):
    for report in terminalreporter.stats.get(kind, ()):
      # A file that is skipped as a whole has no keywords.
      if "namespaces" not in getattr(report, "keywords", ()):
        continue
      if kind == "skipped":
        reasons.append(report.longrepr[2])
      else:
        ran += 1
  if ran or reasons:
    why = "".join(f"; {reason}" for reason in sorted(set(reasons)))
    terminalreporter.write_line(
      f"tests between hosts: {ran} ran, {len(reasons)} did not{why}"
    )


# Compiled programs of earlier files that are worth keeping, small ones of `jnp`
# above all, as long as the process has no more than this.
_ENOUGH_MEMORY = 3 << 29


def _memory():
  """The bytes that this process has in memory."""
  try:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
  except FileNotFoundError:
    return _ENOUGH_MEMORY
  return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="module")
def _clear_caches():
  """Frees compiled programs after a file, so memory stays bounded."""
  yield
  if _memory() >= _ENOUGH_MEMORY:
    jax.clear_caches()
