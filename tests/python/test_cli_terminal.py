"""What a person at a terminal sees on stderr, and what --quiet leaves of it: nothing."""

import os
import pty
import subprocess

import pytest

from moekit_program import FIXTURES, PROGRAM

MODEL = FIXTURES / "qwen3moe-bf16-sharded"
SMALL = "E=8,k=2,H=64,I=32,act=silu,weights=bf16"
VERBS = {
    "run": ["run", "--model", MODEL],
    "check": ["check", "--model", MODEL, "--random", 2],
    "profile": ["profile", "--model", MODEL],
    "bench": ["bench", "--problem", SMALL, "--tokens-list", "1", "--min-time", "0"],
}


def at_terminal(*args):
    """(stdout, stderr) of a run whose stderr is a terminal."""
    master, slave = pty.openpty()
    with subprocess.Popen([str(PROGRAM), *map(str, args)], stdout=subprocess.PIPE, stderr=slave, text=True) as process:
        os.close(slave)
        seen = b""
        while True:
            try:
                block = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not block:
                break
            seen += block
        stdout = process.stdout.read()
        assert process.wait(timeout=600) == 0, seen
    os.close(master)
    return stdout, seen.decode()


@pytest.mark.parametrize("verb", VERBS)
def test_loading_shows_a_bar(verb):
    stdout, stderr = at_terminal(*VERBS[verb])
    assert "[........................] 0 B of " in stderr
    assert "[########################] " in stderr and " s left" in stderr
    # The line is taken away before results come.
    assert stderr.rstrip("\n").endswith("\r\033[K") or "warning" in stderr
    assert "####" not in stdout


@pytest.mark.parametrize("verb", VERBS)
def test_quiet_shows_nothing(verb):
    _, stderr = at_terminal(*VERBS[verb], "--quiet")
    assert stderr == ""
