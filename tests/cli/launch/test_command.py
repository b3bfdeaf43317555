"""`optax-dist launch`, with processes that need nothing but Python."""

import array
import ast
import fcntl
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time

import left_over
import pytest
import run_journals
import waiting

from optax_dist.cli import main
from optax_dist.coordinator import journal
from optax_dist.coordinator.server import process

# Replicas that don't join need no coordinator; then none is started.
_ELSEWHERE = ("--store", "etcd://127.0.0.1:1")
_LIGHT = str(pathlib.Path(__file__).with_name("light_replica.py"))


@pytest.fixture(autouse=True)
def _without_job_variables(monkeypatch):
  for name in list(os.environ):
    if name.startswith("OPTAX_DIST_"):
      monkeypatch.delenv(name)


def _launch(*arguments):
  return main.main(["launch", *map(str, arguments)])


def test_replicas_get_their_numbers_in_the_environment(tmp_path, capfd):
  output = tmp_path / "out"
  flags = ("--replicas", 3, "--replicas-to-aggregate", 2, "--output", output)
  assert _launch(*flags, _LIGHT, "environment", "--replicas", "mine") == 0
  result = {}
  for line in capfd.readouterr().out.splitlines():
    number, rest, variables = re.fullmatch(
      r"\[replica (\d)\] (\[.*?\]) (.*)", line
    ).groups()
    # Arguments after the script are the script's.
    assert rest == "['--replicas', 'mine']"
    result[int(number)] = dict(ast.literal_eval(variables))
  assert sorted(result) == [0, 1, 2]
  first = result[0]
  assert re.fullmatch(r"127\.0\.0\.1:\d+", first["COORDINATOR_ADDRESS"])
  assert len(bytes.fromhex(first["SECRET"])) == 16
  assert first["NUM_REPLICAS"] == "3"
  assert first["REPLICAS_TO_AGGREGATE"] == "2"
  assert first["OUTPUT"] == str(output)
  assert first["JOURNAL"] == str(output / "journal.jsonl")
  assert first["GRACE"] == "30"
  assert "MIN_REPLICAS" not in first
  for number, variables in result.items():
    assert variables == first | {"REPLICA": str(number)}
    log = (output / "replicas" / f"replica-{number}.log").read_text()
    assert log.startswith(f"--- replica {number}, started")
    assert "['--replicas', 'mine']" in log


def test_launcher_inside_another_job_ignores_its_environment(
  monkeypatch, capfd
):
  own = {"REPLICA": "0", "RESTARTS": "0", "NUM_REPLICAS": "1"}
  outer = {
    **{"RUN": "x", "JOURNAL": "/nowhere/journal", "OUTPUT": "/nowhere"},
    **{"NUM_PROCESSES": "2", "PROCESS_INDEX": "1", "REPLICA": "7"},
    "COORDINATOR_ADDRESS": "nowhere:1",
  }
  for name, value in outer.items():
    monkeypatch.setenv(f"OPTAX_DIST_{name}", value)
  assert _launch("--replicas", 1, _LIGHT, "environment") == 0
  variables = dict(ast.literal_eval(capfd.readouterr().out.partition("[] ")[2]))
  assert variables.pop("COORDINATOR_ADDRESS").startswith("127.0.0.1:")
  assert variables.keys() == own.keys() | {
    *("GRACE", "REPLICAS_TO_AGGREGATE", "SECRET")
  }
  assert own.items() <= variables.items()


def test_compiled_programs_are_cached_below_the_output_folder(
  tmp_path, capfd, monkeypatch
):
  variable = "JAX_COMPILATION_CACHE_DIR"
  monkeypatch.delenv(variable, raising=False)
  outputs = iter(range(9))

  def told():
    output = tmp_path / str(next(outputs))
    assert _launch("--output", output, _LIGHT, "compiled") == 0
    (line,) = set(capfd.readouterr().out.splitlines())
    return output, ast.literal_eval(line.partition("] ")[2])

  output, result = told()
  assert result == [str(output / "compiled" / socket.gethostname()), "0"]
  monkeypatch.setenv(variable, "mine")
  assert told()[1] == ["mine", None]


def test_standbys_are_refused_for_replicas_of_several_processes(capfd):
  flags = ("--standby", 1, "--processes-per-replica", 2)
  assert _launch(*flags, *_ELSEWHERE, _LIGHT, "environment") == 2
  assert "--standby is for replicas of one process" in capfd.readouterr().err


def test_any_program_and_modules_can_be_launched(tmp_path, capfd, monkeypatch):
  # Neither joins, so there was no run.
  assert (
    _launch(*_ELSEWHERE, "--", "sh", "-c", "echo $OPTAX_DIST_REPLICA of one")
    == 1
  )
  assert capfd.readouterr().out == "[replica 0] 0 of one\n"
  (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:])")
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  assert (
    _launch(*_ELSEWHERE, "--replicas=1", "-m", "mine", "--restarts", "no") == 1
  )
  assert "[replica 0] ['--restarts', 'no']" in capfd.readouterr().out


def test_all_processes_of_a_replica_restart_together(tmp_path, capfd):
  flags = ("--replicas", 2, "--processes-per-replica", 2, "--restarts", 1)
  assert (
    _launch(*flags, *_ELSEWHERE, _LIGHT, "die-once", tmp_path / "sign") == 0
  )
  lines = capfd.readouterr().out.splitlines()
  assert lines.count("[replica 0.0] ends") == 1
  assert lines.count("[replica 0.1] ends") == 1
  # The other one of the group would have slept for a minute.
  assert "[replica 1.1] dies" in lines
  assert lines.count("[replica 1.0] ends") == 1
  assert lines.count("[replica 1.1] ends") == 1


def test_processes_get_their_index_in_the_environment(capfd):
  flags = ("--replicas", 2, "--processes-per-replica", 2, *_ELSEWHERE)
  assert _launch(*flags, _LIGHT, "environment") == 0
  result = {}
  for line in capfd.readouterr().out.splitlines():
    name, variables = re.fullmatch(
      r"\[replica (.*?)\] \[\] (.*)", line
    ).groups()
    result[name] = dict(ast.literal_eval(variables))
  assert sorted(result) == ["0.0", "0.1", "1.0", "1.1"]
  for name, variables in result.items():
    assert f"{variables['REPLICA']}.{variables['PROCESS_INDEX']}" == name
    assert variables["NUM_PROCESSES"] == "2"


_GROUP = ("--replicas", 1, "--processes-per-replica", 2, "--restarts", 0)


@pytest.mark.parametrize(
  ("joins", "why"),
  [((), "has not joined the run"), (("joins",), "has not left the run")],
)
def test_replica_ends_if_one_of_its_processes_exits_without_leaving(
  capfd, joins, why
):
  """That has ended well, and will not take part any more."""
  assert _launch(*_GROUP, *_ELSEWHERE, _LIGHT, "half", *joins) == 1
  assert (
    f"[launch] replica 0.1 ended with exit code 0, and {why}\n"
  ) in capfd.readouterr().err


def test_error_names_the_process_that_failed_first(capfd, tmp_path):
  sign = tmp_path / "sign"
  assert _launch(*_GROUP, *_ELSEWHERE, _LIGHT, "fail-in-turn", sign) == 1
  err = capfd.readouterr().err
  assert "No replica is left: replica 0.1 ended with exit code 1 after" in err
  assert "The last lines of its output:\nno data\n" in err


@pytest.mark.parametrize(
  ("replicas", "restarts", "words"),
  [
    (1, 3, "No replica is left: replica 0 ended with exit code 9"),
    (
      3,
      0,
      "Only 2 of 3 needed replicas can go on: replica 0 ended with exit code 9",
    ),
  ],
)
def test_launcher_exits_with_the_code_and_last_output_of_the_replica(
  capfd, replicas, restarts, words
):
  flags = ("--replicas", replicas, "--restarts", restarts, *_ELSEWHERE)
  # The others continue until the launcher ends them.
  script = ("--", sys.executable, _LIGHT, "fail", "0")
  if replicas > 1:
    sleep = "[ $OPTAX_DIST_REPLICA = 0 ] || exec sleep 600; exec $0 $1 fail 0"
    script = ("--", "sh", "-c", sleep, sys.executable, _LIGHT)
  assert _launch(*flags, *script) == 9
  err = capfd.readouterr().err
  assert words in err
  assert "The last lines of its output:\nno disk" in err


def test_restarts_of_a_killed_replica_are_printed(tmp_path, capfd):
  """Off a terminal, too: a replica without memory dies again and again."""
  flags = ("--replicas", 2, "--restarts", 2, *_ELSEWHERE)
  assert _launch(*flags, _LIGHT, "killed-twice", tmp_path / "sign") == 0
  lines = capfd.readouterr().err.splitlines()
  assert [line for line in lines if line.startswith("[launch] ")] == [
    "[launch] replica 0 was ended by SIGKILL",
    "[launch] replica 0 starts again (restart 1 of 2)",
    "[launch] replica 0 was ended by SIGKILL",
    "[launch] replica 0 starts again (restart 2 of 2)",
  ]


def test_replica_restarts_although_its_log_cannot_be_written(tmp_path, capfd):
  gone = (
    '[ $OPTAX_DIST_RESTARTS = 1 ] || { rm -r "$2"; kill -9 $$; }; exec $0 $1'
  )
  logs = tmp_path / "out" / "replicas"
  script = ("--", "sh", "-c", gone, sys.executable, _LIGHT, logs)
  flags = ("--replicas", 1, "--output", logs.parent, *_ELSEWHERE)
  assert _launch(*flags, *script) == 0
  printed = capfd.readouterr()
  assert "[replica 0] does nothing" in printed.out
  assert "[replica 0] its log ends here: No such file" in printed.err


def test_journal_records_how_each_process_ended(tmp_path, capfd):
  path = tmp_path / "out" / "journal.jsonl"
  path.parent.mkdir()
  with journal.Journal(path) as written:
    written.write("run", strategy="sync_replicas", step=0)
  flags = ("--replicas", 2, "--output", path.parent, "--resume", *_ELSEWHERE)
  assert _launch(*flags, _LIGHT, "killed-twice", tmp_path / "sign") == 0
  _, *processes = run_journals.whole(path)
  # The journal has each start after the first, and each join.
  result = [(p["replica"], p["ended"]) for p in processes]
  killed = (0, "was ended by SIGKILL")
  assert result[:4] == [killed, (0, None)] * 2
  assert sorted(result[4:]) == [(0, None), (1, None)]
  assert {p["host"] for p in processes} == {socket.gethostname()}
  first, second, third = (p["pid"] for p in (*processes[:3:2], processes[3]))
  assert len({first, second, third}) == 3
  assert processes[1]["pid"] == second
  assert main.main(["watch", str(path), "--once"]) == 0
  assert f"{socket.gethostname()}: {third}" in capfd.readouterr().out


def test_error_quotes_the_first_failure_and_not_its_consequences(capfd):
  script = """import os, sys
first = os.environ["OPTAX_DIST_RESTARTS"] == "0"
sys.exit("ValueError: no data" if first else "RunFinished: the run has ended")
"""
  flags = ("--replicas", 2, "--restarts", 2, "--min-replicas", 2, *_ELSEWHERE)
  sleep = '[ $OPTAX_DIST_REPLICA = 0 ] || exec sleep 600; exec $0 -c "$1"'
  command = ("--", "sh", "-c", sleep, sys.executable, script)
  assert _launch(*flags, *command) == 1
  err = capfd.readouterr().err
  assert "[replica 0] RunFinished: the run has ended" in err
  final = err[err.index("optax-dist: Only 1 of 2 needed") :]
  assert "The last lines of its output:\nValueError: no data\n" in final
  assert "RunFinished" not in final


def test_failed_run_is_an_error_even_if_its_programs_exit_with_0(capfd):
  assert _launch("--replicas", 2, *_ELSEWHERE, _LIGHT, "fail-quietly") == 1
  err = capfd.readouterr().err
  assert "No replica is left: replica " in err
  assert (
    "has ended with exit code 0 after an error (all were removed) after" in err
  )


def test_failure_after_the_run_fails_the_job(capfd):
  assert _launch("--replicas", 2, *_ELSEWHERE, _LIGHT, "fail-late") == 4
  err = capfd.readouterr().err
  assert "[launch] replica 1 ended with exit code 4\n" in err


def test_error_of_a_late_rejoin_fails_the_job(capfd):
  assert _launch("--replicas", 2, *_ELSEWHERE, _LIGHT, "twice") == 3
  err = capfd.readouterr().err
  assert err.count(" ended with exit code 3\n") == 2


def test_exit_codes_are_known_although_sigchld_is_ignored(capfd):
  """A parent process may ignore SIGCHLD, and its children inherit that."""
  before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
  try:
    assert _launch(*_ELSEWHERE, _LIGHT, "fail", 0) == 9
  finally:
    signal.signal(signal.SIGCHLD, before)
  assert "No replica is left: replica 0 ended with exit code 9" in (
    capfd.readouterr().err
  )


_COMMAND = """
import signal, sys
# It may be started where Ctrl-C and the end of a terminal are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from optax_dist.cli import main
sys.exit(main.main(sys.argv[1:]))
"""


class _Started:
  """The command as a process, what it prints, and its process groups."""

  def __init__(self, *arguments):
    self.process = subprocess.Popen(
      [sys.executable, "-c", _COMMAND, "launch", *arguments],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    self.text = ""

  def until(self, words, count=1, seconds=180.0):
    end = time.monotonic() + seconds
    while self.text.count(words) < count:
      left = end - time.monotonic()
      assert left > 0, self.text
      if select.select([self.process.stdout], [], [], left)[0]:
        more = os.read(self.process.stdout.fileno(), 1 << 16)
        assert more, self.text
        self.text += more.decode()

  def groups(self):
    return left_over.groups(self.process.pid)

  def check_nothing_is_left(self, groups):
    left = lambda: [group for group in groups if left_over.has_group(group)]
    waiting.until(lambda: not left(), left)

  def close(self):
    self.process.kill()
    self.process.wait()
    self.process.stdout.close()


@pytest.fixture
def start():
  made = []

  def begin(*arguments):
    made.append(_Started(*arguments))
    return made[-1]

  yield begin
  for one in made:
    one.close()


@pytest.mark.parametrize(
  "signals",
  # A closed terminal and its shell both send the latter.
  [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]],
)
def test_sigterm_and_sighup_are_passed_on_and_waited_for(start, signals):
  one = start("--replicas", "2", *_ELSEWHERE, _LIGHT, "grace")
  one.until("sleeps", 2)
  for number in signals:
    one.process.send_signal(number)
  one.until("leaves", 2)
  assert one.process.wait(180.0) == 128 + signals[0]


def test_ctrl_c_ends_replicas_that_have_not_joined_yet(start):
  """In whatever Python drops its exception, as in callbacks of JAX's."""
  one = start("--replicas", "2", *_ELSEWHERE, _LIGHT, "drops")
  one.until("sleeps", 2)
  one.process.send_signal(signal.SIGINT)
  assert one.process.wait(180.0) == 130
  one.text += one.process.stdout.read().decode()
  assert "goes on" not in one.text


def test_standbys_end_silently_with_the_job(start):
  flags = ("--replicas", "2", "--standby", "1", *_ELSEWHERE)
  one = start(*flags, _LIGHT, "grace")
  one.until("stands by")
  one.process.send_signal(signal.SIGTERM)
  one.until("leaves", 2)
  assert one.process.wait(180.0) == 143
  one.text += one.process.stdout.read().decode()
  assert "is not replaced" not in one.text


def test_signal_ends_a_launcher_that_waits_for_a_host_name(start, monkeypatch):
  flags = ("--nodes", "2", "--node-rank", "0", "--address", "no.invalid:29300")
  monkeypatch.setenv("OPTAX_DIST_SECRET", 16 * "s")
  one = start(*flags, _LIGHT, "nothing")
  one.until("It is tried again")
  one.process.send_signal(signal.SIGTERM)
  assert one.process.wait(180.0) == -signal.SIGTERM


def test_signal_ends_a_launcher_that_waits_for_its_coordinator(monkeypatch):
  def command(settings):
    os.kill(os.getpid(), signal.SIGTERM)
    return [sys.executable, "-S", "-c", "import time; time.sleep(300)"]

  monkeypatch.setattr(process, "command", command)
  assert _launch("--replicas", 1, _LIGHT, "nothing") == 143


def _printing(what, folder):
  """Two replicas that do this endlessly, and leave a file on SIGTERM."""
  leaves = 'trap "touch $0/left-$OPTAX_DIST_REPLICA; exit" TERM'
  script = f"{leaves}; while :; do {what}; done"
  return "--replicas", "2", *_ELSEWHERE, "--", "sh", "-c", script, str(folder)


def test_job_stops_in_order_once_its_output_is_closed(start, tmp_path):
  """As at the end of a connection of ssh, or behind a pipe."""
  one = start(*_printing("echo trains; sleep 0.1", tmp_path))
  one.until("[replica 0] trains")
  one.until("[replica 1] trains")
  one.process.stdout.close()
  one.process.wait(180.0)
  assert sorted(os.listdir(tmp_path)) == ["left-0", "left-1"]


def test_signals_reach_a_job_whose_output_is_not_read(start, tmp_path):
  """As in a pager, or in a terminal that is stopped by Ctrl-S."""
  one = start(*_printing("echo it prints and prints and prints", tmp_path))

  def unread():
    size = array.array("i", [0])
    fcntl.ioctl(one.process.stdout, termios.FIONREAD, size)
    return size[0]

  waiting.until(lambda: unread() > 60_000, unread)  # It takes 64 KiB.
  one.process.send_signal(signal.SIGTERM)
  assert one.process.wait(180.0) == 143
  assert sorted(os.listdir(tmp_path)) == ["left-0", "left-1"]


def test_other_signals_are_passed_on(start):
  one = start("--replicas", "2", *_ELSEWHERE, _LIGHT, "user-signal")
  one.until("sleeps", 2)
  one.process.send_signal(signal.SIGUSR1)
  assert one.process.wait(180.0) == 0
  one.until("leaves", 2)


@pytest.mark.parametrize(
  ("signals", "flags", "code"),
  [
    ([signal.SIGKILL], (), -9),
    ([signal.SIGINT], (), 130),
    ([signal.SIGTERM], ("--grace", "0.5"), 143),  # They only hear it.
    ([signal.SIGTERM, signal.SIGINT], (), 130),
  ],
)
def test_no_process_outlives_the_launcher(start, signals, flags, code):
  one = start("--replicas", "2", *flags, _LIGHT, "deaf")
  one.until("sleeps", 2)
  groups = one.groups()
  # Two replicas, the coordinator, and the watcher; each with a group of its own.
  assert len(groups) == 4
  for number in signals:
    one.process.send_signal(number)
    if number != signals[-1]:
      one.until("hears", 2)  # The first of two is taken by itself.
  assert one.process.wait(180.0) == code
  one.check_nothing_is_left(groups)


def test_a_folder_is_for_one_job_at_a_time(start, tmp_path, capfd):
  output = tmp_path / "out"
  flags = ("--output", str(output), *_ELSEWHERE)
  one = start("--replicas", "1", *flags, _LIGHT, "grace")
  one.until("sleeps")
  for more in ((), ("--resume",)):
    assert _launch(*flags, *more, _LIGHT, "nothing") == 2
    said = capfd.readouterr().err
    holder = f"process {one.process.pid} on {socket.gethostname()} uses it"
    assert f"--output {output}: {holder}; end that job first" in said
  # Another one is free, and so is this one as soon as the job has ended.
  other = ("--output", tmp_path / "other", *_ELSEWHERE)
  assert _launch(*other, _LIGHT, "nothing") == 0
  one.process.send_signal(signal.SIGTERM)
  assert one.process.wait(180.0) == 143
  assert _launch(*flags, "--resume", _LIGHT, "nothing") == 0
  assert sorted(p.name for p in output.iterdir()) == [
    *("coordinator.address", "journal.jsonl", "replicas")
  ]


def test_job_resumes_at_once_after_its_launcher_was_killed(start, tmp_path):
  """It waits for the end of the old replicas, and no longer."""
  flags = ("--replicas", "2", "--output", str(tmp_path), *_ELSEWHERE)
  one = start(*flags, _LIGHT, "deaf")
  one.until("sleeps", 2)
  groups = one.groups()
  one.process.kill()
  again = start(*flags, "--resume", _LIGHT, "grace")
  again.until("sleeps", 2)
  assert not [group for group in groups if left_over.has_group(group)]


def test_jax_processes_that_ignore_sigterm_are_ended(start):
  flags = ("--processes-per-replica", "2", "--grace", "3", *_ELSEWHERE)
  one = start("--replicas", "1", *flags, _LIGHT, "jax-distributed")
  one.until("sleeps", 2)
  groups = one.groups()
  # The watcher and the coordinator have one each, too.
  assert len(groups) == 4
  one.process.send_signal(signal.SIGTERM)
  began = time.monotonic()
  assert one.process.wait(180.0) == 143
  assert time.monotonic() - began >= 3.0  # They have not ended by themselves.
  one.check_nothing_is_left(groups)


def test_a_coordinator_that_is_never_ready_is_an_error(capsys, monkeypatch):
  monkeypatch.setattr(process, "START_SECONDS", 0.0)
  assert _launch("--replicas", 1, "--", "true") == 1
  assert "The coordinator was not ready in 0 s." in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ((), "what shall be launched?"),
    (("--replicas", "2", "nowhere.py"), "there is no script nowhere.py"),
    (("--replicas", "2", "--", "no/program"), "there is no program no/program"),
    (("--secret", "x", _LIGHT), "unknown arguments: --secret"),
    (("--replicas", "2", "--min-replicas", "3", _LIGHT), "is more than the 2"),
    (("--chaos", "slow:1x2", _LIGHT), "numbered 0 to 0"),
    (("--chaos", "melt:0.1", _LIGHT), "must be kill:REPLICA@GRADIENT"),
    (
      ("--nodes", "2", "--node-rank", "0", _LIGHT),
      "what address (OPTAX_DIST_ADDRESS) of the job should be",
    ),
    (("--store", "redis://x", _LIGHT), "A coordinator is at host:port"),
    (("--resume", _LIGHT), "--resume needs --output"),
    (("--grace", "-1", _LIGHT), "--grace"),
  ],
)
def test_impossible_commands_are_refused_at_once(capsys, flags, words):
  assert _launch(*flags) == 2
  assert words in capsys.readouterr().err


@pytest.mark.parametrize(
  ("where", "said"),
  [
    ("file", "it is a file"),
    ("file/below", "Not a directory"),
    ("taken", "Is a directory"),
    ("/proc/here", "can't be written"),
  ],
)
def test_unwritable_output_folder_is_refused(tmp_path, capsys, where, said):
  (tmp_path / "file").write_text("")
  (tmp_path / "taken" / "journal.jsonl").mkdir(parents=True)
  assert _launch("--output", tmp_path / where, _LIGHT) == 2
  error = capsys.readouterr().err
  assert said in error
  assert f"--output {tmp_path / where}" in error


def test_output_folder_with_an_undecodable_name_is_refused(tmp_path, capsys):
  assert _launch("--output", tmp_path / "out\udcff", _LIGHT) == 2
  error = capsys.readouterr().err
  assert "journal.jsonl can't be written: Its name is not in UTF-8" in error


@pytest.mark.parametrize("name", ["journal.jsonl", "coordinator.log"])
def test_output_folder_that_contains_a_pipe_is_refused(tmp_path, capsys, name):
  """A process that opens the pipe would wait for a reader."""
  os.mkfifo(tmp_path / name)
  assert _launch("--output", tmp_path, _LIGHT) == 2
  error = capsys.readouterr().err
  assert f"{tmp_path / name} can't be written: It is no regular file" in error


def test_replica_runs_although_its_log_is_a_pipe(tmp_path, capfd):
  (tmp_path / "replicas").mkdir()
  os.mkfifo(tmp_path / "replicas" / "replica-0.log")
  flags = ("--output", tmp_path, *_ELSEWHERE)
  assert _launch(*flags, _LIGHT, "nothing") == 0
  assert "its log ends here: No such device" in capfd.readouterr().err


def test_journal_of_an_earlier_run_is_kept(tmp_path, capfd):
  path = tmp_path / "journal.jsonl"
  path.write_text('{"kind": "run"}\n')
  flags = ("--output", tmp_path, *_ELSEWHERE)
  assert _launch(*flags, _LIGHT, "environment") == 2
  assert "has the journal of an earlier run; --resume" in (
    capfd.readouterr().err
  )
  assert _launch(*flags, "--resume", _LIGHT, "nothing") == 0
  assert path.read_text() == '{"kind": "run"}\n'
