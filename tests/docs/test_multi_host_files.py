"""The files of docs/multi_host that launch: the commands and variables on each host.

srun, ssh and Ray are stand-ins; the JobSet is checked against its schema.
"""

import importlib.util
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import waiting
import yaml

from optax_dist.cli import main
from optax_dist.cli.launch import job

_FILES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "multi_host"
_SCHEMA = json.loads(
  pathlib.Path(__file__).with_name("jobset_schema.json").read_text()
)

# Stands in for optax-dist, and records its arguments and variables.
_RECORD = """\
#!{python}
import json, os, signal, sys, time
names = "OPTAX", "SLURM", "SRUN"
told = {{k: v for k, v in os.environ.items() if k.startswith(names)}}
name = f"told-{{time.monotonic_ns()}}.json"
if "OPTAX_DIST_SECRET_FILE" in told:
  with open(told["OPTAX_DIST_SECRET_FILE"]) as file:
    told["secret in the file"] = file.read()
if "--wait" in sys.argv:
  def stop(*_):
    with open("stopped", "a") as file:
      file.write("x")
    sys.exit(143)
  signal.signal(signal.SIGTERM, stop)
with open(name + ".new", "w") as file:
  json.dump([sys.argv[1:], told, os.getcwd()], file)
os.rename(name + ".new", name)
if "--wait" in sys.argv:
  time.sleep(600)
"""
_SRUN = """\
#!/bin/sh
# srun: the command once for each task, here one after another.
while [ "${1#--}" != "$1" ]; do shift; done
for SLURM_PROCID in 0 1 2 3; do
  export SLURM_PROCID SLURM_LOCALID=0 SLURM_NTASKS=4
  export SLURM_STEP_NODELIST=node[03-06] SLURM_STEP_NUM_NODES=4
  "$@" || exit
done
"""
_SSH = """\
#!/bin/sh
echo "$1" >> hosts
# Command lines can be read by others.
echo "$2" >> commands
exec sh -c "$2"
"""
_RAY = '''\
"""Stands in for Ray: actors of this process, whose methods run in threads."""
import concurrent.futures, types
_threads = concurrent.futures.ThreadPoolExecutor(20)

class _Actor:
  def __init__(self, made, options):
    self._made, self._options = made, options
  def __getattr__(self, name):
    method = getattr(self._made, name)
    return types.SimpleNamespace(
      remote=lambda *told: _threads.submit(method, *told))

def remote(**options):
  def wrap(cls):
    def choose(**more):
      strategy = more["scheduling_strategy"]
      assert strategy.group.strategy == "STRICT_SPREAD"
      assert more["max_concurrency"] == 2
      return types.SimpleNamespace(remote=lambda: _Actor(cls(), more))
    cls.options = staticmethod(choose)
    return cls
  return wrap

from ray import util
init = lambda: None
def get(found):
  if isinstance(found, list):
    return [one.result() for one in found]
  return found and found.result()
'''
_RAY_UTIL = """\
import types
get_node_ip_address = lambda: "10.0.0.7"
def placement_group(bundles, strategy):
  return types.SimpleNamespace(
    bundles=bundles, strategy=strategy, ready=lambda: None)
class PlacementGroupSchedulingStrategy:
  def __init__(self, placement_group, placement_group_bundle_index):
    self.group = placement_group
    assert 0 <= placement_group_bundle_index < len(placement_group.bundles)
"""


@pytest.fixture
def place(tmp_path):
  """A folder with stand-ins of commands, first on the PATH."""
  tools = tmp_path / "tools"
  for folder in (tools, tmp_path / ".venv" / "bin"):
    folder.mkdir(parents=True)
    _program(folder / "optax-dist", _RECORD.format(python=sys.executable))
  (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
  _program(tools / "srun", _SRUN)
  _program(tools / "ssh", _SSH)
  return tmp_path


def _program(path, text):
  path.write_text(text)
  path.chmod(0o755)


def _start(place, *arguments, **variables):
  named = [n for n in os.environ if n.startswith(("OPTAX_DIST", "SLURM"))]
  env = {k: v for k, v in os.environ.items() if k not in named}
  path = f"{place / 'tools'}:{os.environ['PATH']}"
  return subprocess.Popen(
    list(map(str, arguments)), cwd=place, env=env | variables | {"PATH": path}
  )


def _told(place):
  """Arguments and variables of the stand-ins of optax-dist, in order of their start."""
  return [
    json.loads(path.read_text()) for path in sorted(place.glob("told-*.json"))
  ]


def _job(arguments, environ):
  """The job as the real command understands it."""
  inputs = ["launch", *arguments[arguments.index("launch") + 1 :]]
  args = main.commands().parse_args(inputs)
  args.output = None
  made = job.Job(args, None, environ)
  return made, args


def _check_hosts(found, count):
  """Each host runs one of the replicas, and they agree on all else."""
  assert [made.placement.rank for made, _ in found] == list(range(count))
  assert {made.placement.hosts for made, _ in found} == {count}
  assert len({made.placement.address for made, _ in found}) == 1
  assert len({made.settings.secret for made, _ in found}) == 1
  assert len(found[0][0].settings.secret) == 32
  hosted = [list(made.placement.here) for made, _ in found]
  assert hosted == [[i] for i in range(count)]


def test_slurm_script_starts_the_job(place, monkeypatch):
  process = _start(
    place,
    *("bash", _FILES / "launch_slurm.sh"),
    SLURM_JOB_ID="4111",
    SLURM_CPUS_PER_TASK="64",
  )
  assert process.wait(300) == 0
  result = []
  for arguments, notified, _ in _told(place):
    assert notified["SRUN_CPUS_PER_TASK"] == "64"
    secret = notified.pop("secret in the file")
    file = place / "secret"
    file.write_text(secret)
    notified["OPTAX_DIST_SECRET_FILE"] = str(file)
    for name, value in notified.items():
      monkeypatch.setenv(name, value)  # JAX's detection looks there.
    result.append(_job(arguments, os.environ))
  _check_hosts(result, 4)
  made, args = result[0]
  assert made.placement.address.startswith("node03:")
  assert (made.settings.replicas_to_aggregate, made.needed) == (3, 2)
  assert args.program == ["train_replica.py"]
  # The secret is gone with the job.
  assert list(place.glob(".secret*")) == []
  text = (_FILES / "launch_slurm.sh").read_text()
  (lead,) = re.findall(r"#SBATCH --signal=TERM@(\d+)", text)
  assert args.grace < int(lead)
  # Both of them: the job's options are not those of its steps.
  assert "#SBATCH --no-kill" in text
  assert "srun --no-kill --kill-on-bad-exit=0" in text


def _with_certificates(name):
  """A file with the lines that are for certificates."""
  result, wanted = [], False
  for line in (_FILES / name).read_text().splitlines():
    bare = line.lstrip()
    wanted = bare.startswith("# With certificates") or (
      wanted and bare.startswith("#")
    )
    result.append(line.replace("# ", "", 1) if wanted else line)
    if bare.startswith("# With certificates"):
      result.pop()
  return "\n".join(result) + "\n"


def test_slurm_script_passes_certificates(place):
  script = place / "job.sh"
  script.write_text(_with_certificates("launch_slurm.sh"))
  # Before they are gone with the job.
  checks = (
    "from optax_dist.coordinator.launch.environment import Environment;"
    "from optax_dist.coordinator.transport import tls;"
    "tls.check(Environment.read().find_certificates())"
  )
  _program(
    place / ".venv" / "bin" / "optax-dist",
    f"#!/bin/sh\nexec {sys.executable} -c '{checks}'\n",
  )
  process = _start(
    place, "bash", script, SLURM_JOB_ID="4111", SLURM_CPUS_PER_TASK="64"
  )
  assert process.wait(300) == 0
  assert list(place.glob(".tls*")) == []


def test_certificates_in_pods_are_where_the_variable_says():
  for name in ("kubernetes_coordinator.yaml", "launch_jobset.yaml"):
    document = list(yaml.safe_load_all(_with_certificates(name)))[-1]
    if "replicatedJobs" in document["spec"]:
      assert _wrong(document, _SCHEMA, "JobSet") == []
      (job,) = document["spec"]["replicatedJobs"]
      document = job["template"]
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (notified,) = [
      one["value"]
      for one in container["env"]
      if one["name"] == "OPTAX_DIST_CERTIFICATES"
    ]
    mounts = {
      one["name"]: one["mountPath"] for one in container["volumeMounts"]
    }
    assert {os.path.dirname(path) for path in notified.split(":")} == {
      mounts["certificates"]
    }
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}


def test_ssh_script_starts_the_job(place):
  hosts = ["host0", "host1", "host2"]
  process = _start(
    place,
    *(sys.executable, _FILES / "launch_ssh.py", *hosts, "--"),
    *(
      "--replicas-to-aggregate",
      "2",
      "train_replica.py",
      "--name",
      "it's a run",
    ),
  )
  assert process.wait(300) == 0
  assert sorted((place / "hosts").read_text().split()) == hosts
  notified = _told(place)
  result = sorted(
    (_job(arguments, environ) for arguments, environ, _ in notified),
    key=lambda one: one[0].placement.rank,
  )
  _check_hosts(result, 3)
  made, args = result[0]
  assert made.placement.address == "host0:29300"
  assert args.program == ["train_replica.py", "--name", "it's a run"]
  assert {folder for _, _, folder in notified} == {str(place)}
  assert made.settings.secret not in (place / "commands").read_text()


def test_ssh_script_stops_all_hosts(place):
  process = _start(
    place,
    *(sys.executable, _FILES / "launch_ssh.py", "host0", "host1", "--"),
    *("train_replica.py", "--wait"),
  )
  waiting.until(lambda: len(_told(place)) >= 2)
  process.send_signal(signal.SIGTERM)
  assert process.wait(300) == 143
  assert (place / "stopped").read_text() == "xx"


def test_ssh_script_stops_the_hosts_it_has_started(monkeypatch):
  class Process:
    """A host that ends with its standard input; Ctrl-C comes at the second."""

    def __init__(self, command, **_):
      if command[1] == "host1":
        raise KeyboardInterrupt
      self.stdin = io.StringIO()

    def wait(self):
      assert self.stdin.closed
      return 143

  path = _FILES / "launch_ssh.py"
  spec = importlib.util.spec_from_file_location("launch_ssh", path)
  program = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(program)
  monkeypatch.setattr(subprocess, "Popen", Process)
  monkeypatch.setattr(signal, "signal", lambda *_: None)
  monkeypatch.setattr(
    sys, "argv", ["launch_ssh.py", "host0", "host1", "--", "train_replica.py"]
  )
  assert program.main() == 143


def _start_ray(place, *arguments):
  package = place / "ray" / "util"
  package.mkdir(parents=True)
  (place / "ray" / "__init__.py").write_text(_RAY)
  for name in ("__init__", "placement_group", "scheduling_strategies"):
    (package / f"{name}.py").write_text(_RAY_UTIL)
  return _start(
    place,
    *(sys.executable, _FILES / "launch_ray.py", "--hosts", "3", "--"),
    *arguments,
    PYTHONPATH=str(place),
  )


def test_ray_script_starts_the_job(place):
  flags = ("--output", "/shared/run", "--resume")
  assert _start_ray(place, *flags, "train_replica.py").wait(300) == 0
  result = sorted(
    (_job(arguments, environ) for arguments, environ, _ in _told(place)),
    key=lambda one: one[0].placement.rank,
  )
  _check_hosts(result, 3)
  assert result[0][0].placement.address == "10.0.0.7:29300"
  assert result[0][1].program == ["train_replica.py"]


def test_ray_script_stops_all_hosts(place):
  process = _start_ray(place, "train_replica.py", "--wait")
  waiting.until(lambda: len(_told(place)) >= 3)
  process.send_signal(signal.SIGTERM)
  assert process.wait(300) == 143
  assert (place / "stopped").read_text() == "xxx"


def _wrong(value, schema, at):
  """What of a value is not as a schema of Kubernetes has it."""
  kinds = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
  }
  choices = schema.get("anyOf")
  if choices and all(_wrong(value, one, at) for one in choices):
    return [f"{at}: {value!r} is none of {choices}"]
  kind = kinds.get(schema.get("type"), object)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    return [f"{at}: {value!r} is no {schema['type']}"]
  result = []
  if "enum" in schema and value not in schema["enum"]:
    result.append(f"{at}: {value!r} is none of {schema['enum']}")
  if isinstance(value, dict):
    properties = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    missing = [n for n in schema.get("required", ()) if n not in value]
    result += [f"{at}: {name} is missing" for name in missing]
    for name, one in value.items():
      if name not in properties and more is False:
        result.append(f"{at}: there is no field {name}")
      inner = properties.get(name, more if isinstance(more, dict) else {})
      result += _wrong(one, inner, f"{at}.{name}")
  if isinstance(value, list):
    for index, one in enumerate(value):
      result += _wrong(one, schema.get("items", {}), f"{at}[{index}]")
  return result


def _jobset():
  text = (_FILES / "launch_jobset.yaml").read_text()
  (result,) = yaml.safe_load_all(text)
  return result


def test_jobset_matches_its_schema():
  assert _wrong(_jobset(), _SCHEMA, "JobSet") == []


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda s: s.update(replicatedJob=[]), "no field replicatedJob"),
    (lambda s: s["replicatedJobs"][0].pop("name"), "name is missing"),
    (lambda s: s["failurePolicy"].update(maxRestarts="5"), "no integer"),
    (
      lambda s: s["failurePolicy"].update(restartStrategy="Again"),
      "none of",
    ),
    (
      lambda s: s["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
      ][0]["env"].append({"value": "x"}),
      "name is missing",
    ),
  ],
)
def test_jobset_that_violates_the_schema_is_found(change, words):
  result = _jobset()
  change(result["spec"])
  assert words in " ".join(_wrong(result, _SCHEMA, "JobSet"))


def test_pods_of_the_jobset_get_their_environment():
  result = _jobset()
  name = result["metadata"]["name"]
  (replicated,) = result["spec"]["replicatedJobs"]
  spec = replicated["template"]["spec"]
  assert spec["completionMode"] == "Indexed"
  assert spec["parallelism"] == spec["completions"] == 4
  # An eviction does not count as a failure; that needs pods that end for good.
  (rule,) = spec["podFailurePolicy"]["rules"]
  assert rule["action"] == "Ignore"
  assert rule["onPodConditions"] == [{"type": "DisruptionTarget"}]
  pod = spec["template"]["spec"]
  assert pod["restartPolicy"] == "Never"
  (container,) = pod["containers"]
  assert container["command"] == ["optax-dist", "launch"]
  secret = "5" * 32
  jobs = []
  for index in range(spec["completions"]):
    notified = {}
    for one in container["env"]:
      source = one.get("valueFrom", {})
      match source:
        case {"fieldRef": {"fieldPath": path}}:
          annotation = "batch.kubernetes.io/job-completion-index"
          assert path == f"metadata.annotations['{annotation}']"
          notified[one["name"]] = str(index)
        case {"secretKeyRef": {"name": "optax-dist", "key": "secret"}}:
          notified[one["name"]] = secret
        case _:
          notified[one["name"]] = one["value"]
    jobs.append(_job(["launch", *container["args"]], notified))
  _check_hosts(jobs, spec["completions"])
  made, args = jobs[0]
  # The name by which pod 0 is found, and a port that is open.
  host, port = made.placement.address.split(":")
  assert host == f"{name}-{replicated['name']}-0-0.{name}"
  assert int(port) in [p["containerPort"] for p in container["ports"]]
  assert args.grace < pod["terminationGracePeriodSeconds"]
  assert args.resume
  volumes = {v["name"] for v in pod["volumes"]}
  assert {m["name"] for m in container["volumeMounts"]} <= volumes


def test_page_shows_every_file():
  page = (_FILES.parent / "multi_host.md").read_text()
  for path in _FILES.iterdir():
    if path.is_file():
      assert f"multi_host/{path.name}" in page, path.name


def test_launch_options_in_the_files_exist():
  """A file that names an option which is gone fails above, as here."""
  assert main.main(["launch", "--replica", "2", "x.py"]) == 2
