"""Ranks under mpirun, each of which leaves its own exit status and standard error behind."""

import json
import os
import shutil
import stat
import subprocess
import time

from moekit_program import PROGRAM, moekit


def why_not():
    """Why these tests can't run, or an empty string."""
    if shutil.which("mpirun") is None:
        return "mpirun is missing; install openmpi-bin and libopenmpi-dev, and build again"
    if not PROGRAM.exists():
        return ""
    parts = {part["name"]: part for part in json.loads(moekit("doctor", "--json").stdout)["components"]}
    return "" if parts["mpi plug-in"]["found"] else parts["mpi plug-in"]["detail"]


MISSING = why_not()

# Every rank runs the program through this, which keeps its status where the launcher can't lose it. RANK<r>_ARGS
# replaces a rank's arguments; STRIKE<r> is a signal for a rank that has begun to run the layer.
WRAPPER = """#!/bin/bash
folder=$1; shift
rank=$OMPI_COMM_WORLD_RANK
args="RANK${rank}_ARGS"; strike="STRIKE${rank}"
[ -z "${!args}" ] || eval "set -- \\"$1\\" ${!args}"
if [ -n "${!strike}" ]; then
  "$@" --log "$folder/log$rank" 2>"$folder/stderr$rank" &
  until grep -q 'making rank' "$folder/log$rank" 2>/dev/null; do sleep 0.05; done
  sleep 0.5
  kill -"${!strike}" $!
  if [ "${!strike}" = STOP ]; then
    # Gone when the others are.
    until [ "$(ls "$folder" | grep -c '^status')" -ge $((OMPI_COMM_WORLD_SIZE - 1)) ]; do sleep 0.1; done
    kill -KILL $!
  fi
  wait $!
  echo struck >"$folder/status$rank"
else
  "$@" 2>"$folder/stderr$rank"
  echo $? >"$folder/status$rank"
fi
exit 0
"""


class Launched:
    """A finished mpirun: what rank 0 printed, and each rank's status and standard error."""

    def __init__(self, stdout, folder, ranks):
        self.stdout = stdout
        self.status = [self.read(folder / f"status{r}") for r in range(ranks)]
        self.stderr = [self.read(folder / f"stderr{r}") for r in range(ranks)]

    @staticmethod
    def read(path):
        return path.read_text().strip() if path.exists() else None

    def expect_done(self):
        assert self.status == ["0"] * len(self.status), "\n".join(str(text) for text in self.stderr)


def mpirun(folder, ranks, *args, program=PROGRAM, hosts=None, **environment):
    """Runs `program args...` as `ranks` processes, on this machine or on `hosts` (mpi_hosts.Hosts)."""
    wrapper = folder / "wrapper.sh"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    command = ["mpirun", "--enable-recovery", "--oversubscribe", "-n", str(ranks)]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if hosts is not None:
        command = [*hosts.enter, *command, *hosts.launcher_options]
    command += [str(wrapper), str(folder), str(program), *[str(a) for a in args]]
    for old in folder.glob("status*"):
        old.unlink()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **environment}) as process:
        return Launched(wait_for(process, folder, ranks, hosts), folder, ranks)


def wait_for(process, folder, ranks, hosts):
    """What mpirun printed. Over hosts it may wait for ever for ranks that have ended without MPI_Finalize (4.1.4): when all have
    left their status it is given two seconds."""
    until, limit = None, time.monotonic() + 200
    while True:
        try:
            return process.communicate(timeout=0.1)[0]
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if now > limit:
                process.kill()
            if hosts is None or len(list(folder.glob("status*"))) < ranks:
                continue
            until = until or now + 2
            if now > until:
                hosts.end()


def over_mpi(ranks, *more):
    return ["--ranks", ranks, "--transport", "mpi", *more]
