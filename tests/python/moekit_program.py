"""Runs the built program: build/moekit of this checkout, or the one that MOEKIT_PROGRAM names."""

import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
PROGRAM = pathlib.Path(os.environ.get("MOEKIT_PROGRAM", ROOT / "build" / "moekit"))


def moekit(*args, **kwargs):
    """The finished process of `moekit args...`."""
    command = [str(PROGRAM), *[str(a) for a in args]]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **kwargs)


def json_lines(*args):
    """Parsed lines of a verb that must succeed; stdout holds nothing but JSON."""
    done = moekit(*args, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def json_object(*args):
    lines = json_lines(*args)
    assert len(lines) == 1
    return lines[0]
