"""Tests of a job's settings, from arguments and environment."""

import argparse

import pytest

from optax_dist.cli import errors, main
from optax_dist.cli.launch import job
from optax_dist.cli.runs import view
from optax_dist.cli.runs.web import server

_HOSTS = {
  "OPTAX_DIST_NODES": "2",
  "OPTAX_DIST_NODE_RANK": "1",
  "OPTAX_DIST_ADDRESS": "host0:29300",
}
_SECRET = {"OPTAX_DIST_SECRET": "sixteen bytes or more"}


def _job(environ=None, journal=None, **given):
  names = (
    "num_replicas replicas_to_aggregate min_replicas faults output nodes node_rank"
    " address local_addr store run secret_file step_timeout"
  )
  args = dict.fromkeys(names.split()) | {"processes_per_replica": 1}
  args |= {"external": False} | given
  return job.Job(argparse.Namespace(**args), journal, environ or {})


def test_settings_of_a_job_on_several_hosts_are_checked():
  made = _job(_HOSTS | _SECRET)
  assert (
    made.placement.replicas,
    made.placement.rank,
    made.placement.hosts,
  ) == (2, 1, 2)
  assert made.settings.secret == "sixteen bytes or more"
  with pytest.raises(errors.CommandError, match="need a secret"):
    _job(_HOSTS)
  with pytest.raises(errors.CommandError, match="at least 2 processes, got 1"):
    _job(_HOSTS | _SECRET, num_replicas=1)
  one = _job(_HOSTS | _SECRET, num_replicas=1, processes_per_replica=2)
  assert one.placement.replicas == 1


def test_host_without_the_journal_names_the_host_that_has_it(tmp_path, capsys):
  path = tmp_path / "journal.jsonl"
  path.touch()
  shown = view.View(path)
  page = server.Server(shown)
  try:
    metrics = page.metrics()
    assert metrics == "# nothing has been written to this journal yet\n"
    made = _job(_HOSTS | _SECRET)
    made.note_writer(path)
    where = (
      f"the run's is on the host of its coordinator, {made.placement.address}"
    )
    assert where in page.metrics()
    assert all(line[0] == "#" for line in page.metrics().splitlines())
    assert where in page.state()["trouble"]
  finally:
    page.close()
  assert main.main(["watch", "--once", str(path)]) == 0
  assert where in capsys.readouterr().out
  for command in (["report"], ["simulate", "--journal"], ["plan", "--journal"]):
    assert main.main([*command, str(path)]) == 2
    assert where in capsys.readouterr().err


def test_the_address_of_a_host_with_several_networks_can_be_given():
  assert _job().placement.local_addr is None
  assert _job(local_addr="127.0.0.2").placement.local_addr == "127.0.0.2"
  variables = {"OPTAX_DIST_LOCAL_ADDR": "127.0.0.3"}
  assert _job(variables).placement.local_addr == "127.0.0.3"
  assert (
    _job(variables, local_addr="127.0.0.2").placement.local_addr == "127.0.0.2"
  )
  for wrong in ("192.0.2.1", "127.0.0.1:29400", "no such host"):
    with pytest.raises(
      errors.CommandError, match=r"--local-addr.*of this host"
    ):
      _job(local_addr=wrong)


def test_secret_may_be_in_a_file(tmp_path):
  file = tmp_path / "secret"
  file.write_text("of a file, long enough\n")
  assert _job(secret_file=file).settings.secret == "of a file, long enough"
  mounted = {"OPTAX_DIST_SECRET_FILE": str(file)}
  assert _job(mounted).settings.secret == "of a file, long enough"
  # Arguments take precedence over variables.
  assert _job(_SECRET, secret_file=file).settings.secret.startswith("of a file")
  file.write_text("short")
  with pytest.raises(errors.CommandError, match="at least 16 bytes") as caught:
    _job(mounted)
  assert "short" not in str(caught.value)


def test_persistent_store_needs_a_run_name():
  etcd = {"store": "etcd://a,b,c"}
  one, two = _job(**etcd), _job(**etcd)
  prefix = f"optax-dist%2F{one.settings.run}"
  assert one.settings.store == f"etcd://a,b,c?prefix={prefix}"
  assert one.settings.run != two.settings.run
  several = _HOSTS | _SECRET
  with pytest.raises(errors.CommandError, match="need --run NAME"):
    _job(several, **etcd)
  assert _job(several, run="mine", **etcd).settings.run == "mine"
  slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
  assert _job(several | slurm, **etcd).settings.run == "slurm-7.2"
  # The log of a launcher is a new one each time.
  assert _job(several | slurm).settings.run is None


def test_password_is_accepted_only_in_the_environment():
  url = "etcd://me:hidden@a"
  with pytest.raises(errors.CommandError, match="OPTAX_DIST_STORE") as caught:
    _job(store=url)
  assert "hidden" not in str(caught.value)
  made = _job({"OPTAX_DIST_STORE": url}, run="mine")
  assert made.settings.store == f"{url}?prefix=optax-dist%2Fmine"
  assert "hidden" not in repr(made.settings)
