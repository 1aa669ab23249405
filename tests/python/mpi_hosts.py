"""Hosts that are namespaces of this machine: each with a name, a network, process ids and shared memory of its own, joined by
a cable (a veth pair). To processes in them, and to Open MPI, they are machines that share a disk."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

# RFC 2544 sets this network aside for tests; the other end of the cable is all that is on it.
ADDRESSES = ["198.18.77.1", "198.18.77.2"]
AGENT = """#!/bin/bash
# What mpirun takes for ssh: HOST COMMAND...
host=$1; shift
case $host in
%s
esac
echo "no host has the address $host" >&2
exit 1
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def why_no_hosts():
    """Why hosts can't be made here, or an empty string."""
    for program in ["ip", "unshare", "nsenter"]:
        if shutil.which(program) is None:
            return f"{program} is missing; install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "network namespaces are made as root"
    try:
        with Hosts(pathlib.Path("/tmp"), probe=True):
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        return f"this machine makes no hosts: {getattr(error, 'stderr', None) or error}"


class Hosts:
    """Two hosts with two ranks each: ranks 0 and 1 on the first, which runs mpirun, 2 and 3 on the second."""

    slots = 2

    def __init__(self, folder, probe=False):
        self.folder = folder
        self.names = [f"moekit{os.getpid()}{letter}" for letter in "ab"]
        self.probe = probe

    def __enter__(self):
        try:
            self.make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_):
        self.remove()

    def make(self):
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(self.names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        if self.probe:
            subprocess.run([*self.on(0), "true"], capture_output=True, text=True, check=True)
            return
        agent = self.folder / "agent.sh"
        ways = [f'{address}) exec {" ".join(self.on(i, quote=True))} bash -c "$*" ;;' for i, address in enumerate(ADDRESSES)]
        agent.write_text(AGENT % "\n".join(ways))
        agent.chmod(0o755)
        where = ",".join(f"{address}:{self.slots}" for address in ADDRESSES)
        self.launcher_options = ["--mca", "plm_rsh_agent", str(agent), "--host", where]

    def remove(self):
        self.end()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            # What a launch that was killed leaves behind.
            shutil.rmtree(f"{tempfile.gettempdir()}/ompi.{name}.{os.geteuid()}", ignore_errors=True)

    def end(self):
        """Ends what still runs on the hosts."""
        for name in self.names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in listed.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def on(self, host, quote=False):
        """The words before a command that runs on a host. Its processes end with the command."""
        script = f'hostname {self.names[host]}; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child",
                "--mount-proc", "bash", "-c", f"'{script}'" if quote else script, "-"]

    @property
    def enter(self):
        return self.on(0)

    def pull_the_cable(self):
        ip("-n", self.names[0], "link", "set", "cable", "down")

    def bytes_sent(self):
        """By each host since it was made."""
        return [json.loads(ip("-n", name, "-s", "-j", "link", "show", "cable"))[0]["stats64"]["tx"]["bytes"] for name in self.names]
