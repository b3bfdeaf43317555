"""Tests of `optax-dist launch` on clusters, which determine the host.

Each test makes the environment that a scheduler gives the processes of a job, runs
the command in each of them, and looks at what replicas are told.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
from jax._src.clusters import k8s_cluster

from optax_dist.cli import main

_LIGHT = str(pathlib.Path(__file__).with_name("light_replica.py"))
_SECRET = "5" * 32
_COMMAND = [
  *("launch", "--store", "etcd://127.0.0.1:1", "--run", "first"),
  *(_LIGHT, "environment"),
]
_SCHEDULERS = (
  *("OPTAX_DIST_", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_"),
  *("JAX_", "GCE_", "JOB_"),
)


@pytest.fixture(autouse=True)
def _without_job_variables(monkeypatch):
  for name in list(os.environ):
    if name.startswith(_SCHEDULERS):
      monkeypatch.delenv(name)
  monkeypatch.setenv("OPTAX_DIST_SECRET", _SECRET)


def _told(printed):
  """The environments of replicas, by number."""
  result = {}
  for line in printed.splitlines():
    number, here = re.fullmatch(r"\[replica (\d+)\] \[\] (.*)", line).groups()
    result[int(number)] = dict(ast.literal_eval(here))
  return result


def _launch_here(capfd):
  assert main.main(_COMMAND) == 0
  return _told(capfd.readouterr().out)


def _launch(**variables):
  """The command as a process, with nothing but variables from the cluster."""
  done = subprocess.run(
    [sys.executable, "-m", "optax_dist", *_COMMAND],
    env=os.environ | variables,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return _told(done.stdout)


def _check_one_each(hosts):
  """Each host has its own replica, of as many as there are hosts."""
  assert [list(here) for here in hosts] == [[i] for i in range(len(hosts))]
  for number, here in enumerate(hosts):
    assert here[number]["NUM_REPLICAS"] == str(len(hosts))
    assert here[number]["REPLICAS_TO_AGGREGATE"] == str(len(hosts))
    assert here[number]["SECRET"] == _SECRET
    assert here[number]["COORDINATOR_ADDRESS"].startswith("etcd://")


def test_launch_finds_its_host_in_tpu_pods_of_gke(tmp_path):
  """Processes of their own: JAX finds its TPU library and the pods' names."""
  library = tmp_path / "libtpu.so"
  library.touch()
  tpu = {
    "JAX_FORCE_TPU_INIT": "1",
    "TPU_LIBRARY_PATH": str(library),
    "TPU_WORKER_HOSTNAMES": "localhost,pod-1",
    # One slice; without these the metadata server is asked.
    "MEGASCALE_COORDINATOR_ADDRESS": "",
    "MEGASCALE_NUM_SLICES": "",
    "MEGASCALE_SLICE_ID": "",
  }
  _check_one_each([_launch(**tpu, TPU_WORKER_ID=str(i)) for i in (0, 1)])


def _kubernetes(namespace, pod, job):
  """The package, with an API server that knows one pod."""

  def list_pods(namespace, field_selector):
    assert (namespace, field_selector) == ("train", "status.podIP=127.0.0.1")
    return types.SimpleNamespace(items=[pod])

  def read_job(name, namespace):
    assert (name, namespace) == (pod.metadata.labels["job-name"], "train")
    return job

  module = types.ModuleType("kubernetes")
  module.config = types.SimpleNamespace(load_incluster_config=lambda: None)
  module.client = types.SimpleNamespace(
    CoreV1Api=lambda: types.SimpleNamespace(list_namespaced_pod=list_pods),
    BatchV1Api=lambda: types.SimpleNamespace(read_namespaced_job=read_job),
    exceptions=types.SimpleNamespace(ApiException=OSError),
  )
  return module


def test_launch_finds_its_host_in_pods_of_a_jobset(capfd, monkeypatch):
  """JAX asks Kubernetes for the job, and takes the index from the environment."""
  named = lambda name, **more: types.SimpleNamespace(
    metadata=types.SimpleNamespace(
      name=name,
      labels={
        "job-name": "optax-dist-host-0",
        "jobset.sigs.k8s.io/jobset-name": "optax-dist",
      },
      owner_references=[types.SimpleNamespace(controller=True, kind="Job")],
    ),
    **more,
  )
  job = named("optax-dist-host-0", spec=types.SimpleNamespace(parallelism=3))
  looked_up = []

  def resolve(name):
    looked_up.append(name)
    return "127.0.0.1"

  monkeypatch.setattr(k8s_cluster.socket, "gethostbyname", resolve)
  monkeypatch.setitem(
    sys.modules, "kubernetes", _kubernetes("train", named("pod"), job)
  )
  monkeypatch.setattr(
    k8s_cluster.K8sCluster, "_namespace", classmethod(lambda cls: "train")
  )
  monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
  monkeypatch.setenv("HOSTNAME", "optax-dist-host-0-1")
  hosts = []
  for index in range(3):
    for kept in ("_pod", "_job", "_controller"):
      getattr(k8s_cluster.K8sCluster, kept).__func__.cache_clear()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
    hosts.append(_launch_here(capfd))
  _check_one_each(hosts)
  assert "optax-dist-host-0-0.optax-dist" in looked_up


def test_launch_finds_its_host_in_tasks_of_srun(capfd, monkeypatch):
  monkeypatch.setenv("SLURM_JOB_ID", "4111")
  monkeypatch.setenv("SLURM_STEP_NODELIST", "node[03-05]")
  monkeypatch.setenv("SLURM_NTASKS", "3")
  monkeypatch.setenv("SLURM_LOCALID", "0")
  hosts = []
  for index in range(3):
    monkeypatch.setenv("SLURM_PROCID", str(index))
    hosts.append(_launch_here(capfd))
  _check_one_each(hosts)
