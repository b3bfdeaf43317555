"""Test set-up: 8 CPU devices, strict dtype promotion, no work left pending."""

import os

# Tests run on CPU devices, wherever they run: a machine with one accelerator
# could not hold the 8-device tier.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

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


@pytest.fixture(autouse=True, scope="module")
def _clear_caches():
  """Frees compiled programs after each file, so memory stays bounded."""
  yield
  jax.clear_caches()
