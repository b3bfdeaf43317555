"""`optax-dist launch` as on several hosts, of which some were started wrongly."""

import pathlib
import re
import signal

import commands
import pytest
import waiting

from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import addresses

_PROGRAM = str(pathlib.Path(__file__).with_name("hosts_program.py"))


class _Job:
  """The launchers of a job, each as if on a host of its own."""

  def __init__(self, start, nodes):
    self.start, self._nodes = start, nodes
    self.address = f"127.0.0.1:{addresses.free_ports()[0]}"

  def launch(
    self,
    rank,
    *program,
    flags=(),
    secret=commands.SECRET,
    nodes=None,
    steps=30,
    script=_PROGRAM,
  ):
    """Starts a launcher; returns it, and what reads its output."""
    nodes = nodes or self._nodes
    return self.start(
      *("launch", "--nodes", nodes, "--node-rank", rank),
      *("--address", self.address, "--replicas", nodes),
      *("--local-addr", "127.0.0.1", *flags, script, steps, *program),
      OPTAX_DIST_SECRET=secret,
    )


@pytest.fixture
def job(tmp_path, request):
  with commands.starting(tmp_path) as start:
    yield _Job(start, getattr(request, "param", 2))


def _joined(text):
  waiting.until(lambda: "joined at" in text(), text)


def _ends(code, *launched):
  for one, text in launched:
    assert one.wait(180.0) == code, text()


@pytest.mark.parametrize("job", [3], indirect=True)
def test_differing_host_that_comes_first_ends_and_the_others_continue(job):
  """It does not define the job, and is named on all of them; it may come again."""
  wrong = job.launch(2, "size=3")
  first = job.launch(0, "late=8")
  _joined(wrong[1])
  second = job.launch(1)
  _ends(1, wrong)
  text = wrong[1]()
  assert "it differs in its parameters" in text
  assert "starts again" not in text
  assert "Correct that, and start this launcher again." in text
  said = "replica 2 may not join: it differs in its parameters"
  for _, other in (first, second):
    waiting.until(lambda read=other: said in read(), other)
  right = job.launch(2)
  _ends(0, first, second, right)
  assert all("ends at 30" in read() for _, read in (first, second, right))


def test_two_differing_hosts_both_end_with_the_difference(job):
  both = job.launch(0), job.launch(1, "size=3")
  _ends(1, *both)
  for _, text in both:
    assert "Beside replica" in text()
    assert "it differs in its parameters" in text()
    assert "starts again" not in text()


def test_unresolvable_host_name_is_named(job):
  job.address = "nowhere.invalid:29300"
  wrong = job.launch(1, "timeout=5", flags=("--restarts", 0))
  _ends(1, wrong)
  assert "name 'nowhere.invalid' can't be resolved" in wrong[1]()


def test_launcher_with_another_secret_ends_at_once(job):
  first, text = job.launch(0)
  _joined(text)
  wrong = job.launch(1, secret="another secret of enough bytes")
  _ends(1, wrong)
  said = "refuses this launcher: it has another secret, or another run"
  assert said in wrong[1]()
  assert "starts again" not in wrong[1]()
  _ends(0, (first, text), job.launch(1))


def test_run_does_not_wait_for_a_host_whose_replica_never_joins(job):
  """Its process dies in its imports; the other host is notified, and continues."""
  flags = ("--min-replicas", 1, "--restarts", 0)
  dead = job.launch(1, "dies=1", flags=flags)
  # For longer than a launcher waits for news before it gives a replica up.
  alive = job.launch(0, "timeout=600", flags=flags, steps=150)
  _ends(1, dead)
  _ends(0, alive)
  assert "step 150 of 1" in alive[1]()


def test_failure_of_a_required_host_ends_the_run(job):
  flags = ("--restarts", 0)
  alive = job.launch(0, "timeout=600", flags=flags)
  dead = job.launch(1, "dies=1", flags=flags)
  _ends(1, dead, alive)
  assert "The run needs replicas that have never joined" in alive[1]()
  assert "replica 1 ended with exit code 1" in alive[1]()
  assert "starts again" not in alive[1]()


def test_second_launcher_of_a_host_ends_and_the_first_continues(job):
  first = job.launch(0, steps=400), job.launch(1, steps=400)
  for _, text in first:
    _joined(text)
  second = job.launch(1, steps=400)
  _ends(1, second)
  assert "another launcher has rank 1 of this job (process " in second[1]()
  third = job.launch(0, steps=400)
  _ends(1, third)
  port = int(job.address.rpartition(":")[2])
  assert "Another coordinator has the log " in third[1]()
  assert process.default_log(port).exists()
  _ends(0, *first)
  assert not any("starts again" in text() for _, text in first)


def test_launcher_with_other_settings_is_refused_with_the_difference(job):
  _joined(job.launch(0)[1])
  for nodes, flags in ((3, ()), (2, ("--replicas", 4))):
    other = job.launch(1, nodes=nodes, flags=flags)
    _ends(1, other)
    replicas = 4 if flags else 3
    has = f"this launcher has --nodes {nodes} --replicas {replicas} "
    assert has in other[1]()
    assert "and that of rank 0 (process " in other[1]()


def test_late_or_restarted_launcher_joins_the_run(job, tmp_path):
  """It joins with or without the output folder of the run."""
  flags = ("--replicas-to-aggregate", 1, "--output", tmp_path / "out")
  first = job.launch(0, steps=900, flags=flags)
  waiting.until(lambda: "step 20 of 1" in first[1](), first[1])
  late, text = job.launch(1, flags=flags, steps=900)
  waiting.until(lambda: re.search(r"joined at \d\d", text()), text)
  late.send_signal(signal.SIGKILL)
  late.wait()
  again = job.launch(1, flags=(*flags, "--resume"), steps=900)
  waiting.until(lambda: re.search(r"joined at \d\d", again[1]()), again[1])
  _ends(0, first, again)


def test_launcher_reports_that_the_coordinator_is_gone_and_back(job, tmp_path):
  own = ("coordinator", "--address", job.address, "--output", tmp_path / "own")
  flags = ("--no-coordinator", "--run", "x")
  made, _ = job.start(*own)
  one, text = job.launch(0, flags=flags, steps=200)
  other = job.launch(1, flags=flags, steps=200)
  _joined(text)
  _joined(other[1])
  made.kill()
  made.wait()
  gone = f"[launch] the coordinator at {job.address} is gone: "
  waiting.until(lambda: gone in text() and gone in other[1](), text)
  assert "each a little longer than the `timeout` of its join" in text()
  says = "replica 1 goes on, and waits for it for at most"
  waiting.until(lambda: says in other[1](), other[1])
  job.start(*own)
  _ends(0, (one, text), other)
  assert f"the coordinator at {job.address} is there again" in text()


def test_diverged_run_fails_the_job(job):
  """All gradients on leased samples are NaN: nothing is started again."""
  both = job.launch(0, "nan=1"), job.launch(1, "nan=1")
  _ends(1, *both)
  for _, text in both:
    assert "starts again" not in text()
    assert "The run has ended with an error: replica " in text()
    assert "samples were skipped, because gradients on them were not" in text()


@pytest.mark.parametrize("job", [4], indirect=True)
def test_death_of_a_launcher_ends_all_processes_of_its_replica(job, tmp_path):
  """The other half's launcher names it, and ends with the run of the others."""
  script = pathlib.Path(__file__).with_name("half_program.py")
  flags = ("--replicas", 2, "--processes-per-replica", 2, "--min-replicas", 1)
  end = tmp_path / "end"
  made = [
    job.launch(rank, flags=flags, script=script, steps=end) for rank in range(4)
  ]
  for rank, (_, text) in enumerate(made):
    words = f"process {rank // 2} {rank % 2}"
    waiting.until(lambda read=text, line=words: line in read(), text)
  waits = "waits for process 1 of its replica"
  waiting.until(lambda: waits in made[2][1](), made[2][1])
  killed = made[3][0]
  killed.kill()
  named = f"the launcher of rank 3 (process {killed.pid} on "
  waiting.until(lambda: named in made[2][1](), made[2][1])
  assert "replica 1 needs its processes there" in made[2][1]()
  # Healthy replicas go on, however long that takes.
  steps = lambda: made[0][1]().count("step ")
  before = steps()
  waiting.until(lambda: steps() > before + 10, made[0][1])
  assert made[2][0].poll() is None
  end.touch()
  # Long before anybody gives up.
  assert made[0][0].wait(60.0) == 0, made[0][1]()
  assert made[2][0].wait(60.0) == 0, made[2][1]()
  assert "ends well" in made[0][1]()
  made[1][0].terminate()  # Its process has nothing to do with the run.
