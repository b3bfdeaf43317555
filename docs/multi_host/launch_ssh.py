"""Launches a job on hosts that are reached by ssh.

  python launch_ssh.py host0 host1 host2 -- --output first train_replica.py --steps 300

Each host has the same folder at the same path, with .venv in it. Ctrl-C here stops
all of them; so does the end of a connection.
"""

import os
import secrets
import shlex
import signal
import subprocess
import sys

# The secret comes over standard input, for command lines can be read by others. When
# that ends, the launcher gets SIGTERM.
REMOTE = """\
cd {folder} && read -r OPTAX_DIST_SECRET && export OPTAX_DIST_SECRET || exit 1
exec 3<&0 < /dev/null
(cat <&3 > /dev/null 2>&1; kill -TERM $$ 2> /dev/null) > /dev/null 2>&1 &
exec 3<&-
exec .venv/bin/optax-dist launch {options}"""


def main() -> int:
  at = sys.argv.index("--")
  hosts, rest = sys.argv[1:at], sys.argv[at + 1 :]
  secret = secrets.token_hex(16)
  # SIGTERM is for the same as Ctrl-C.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  processes = []
  try:
    for rank, host in enumerate(hosts):
      options = ["--nodes", len(hosts), "--node-rank", rank]
      options += ["--address", f"{hosts[0]}:29300", *rest]
      command = REMOTE.format(
        folder=shlex.quote(os.getcwd()), options=shlex.join(map(str, options))
      )
      process = subprocess.Popen(
        ["ssh", host, command],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is not for ssh.
      )
      processes.append(process)
      process.stdin.write(secret + "\n")
      process.stdin.flush()
    codes = [process.wait() for process in processes]
  except KeyboardInterrupt:
    for process in processes:
      process.stdin.close()
    codes = [process.wait() for process in processes]
  return max(codes, key=abs, default=130)


if __name__ == "__main__":
  sys.exit(main())
