"""Tab completion in bash, by the script that shtab makes."""

import subprocess

import pytest
import shtab

from optax_dist.cli import main


@pytest.mark.parametrize(
  ("line", "completed"),
  [
    ("optax-dist wa", ["watch"]),
    ("optax-dist launch --replicas-", ["--replicas-to-aggregate"]),
    ("optax-dist simulate --comm", ["--communication"]),
    ("optax-dist doctor --local", ["--local-addr", "--local_addr"]),
  ],
)
def test_tab_completes_commands_and_their_options(line, completed, tmp_path):
  script = tmp_path / "completion.bash"
  script.write_text(shtab.complete(main.commands(), shell="bash"))
  words = line.split()
  press_tab = (
    f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1};"
    f" $(complete -p optax-dist | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
    f' optax-dist {words[-1]} {words[-2]}; printf "%s\\n" "${{COMPREPLY[@]}}"'
  )
  done = subprocess.run(
    ["bash", "-c", press_tab], capture_output=True, text=True, timeout=60
  )
  assert done.stdout.split() == completed, done.stderr
