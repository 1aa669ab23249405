"""Runs the moekit program of the wheel."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import sysconfig


def program() -> str:
    """Path of the moekit program: MOEKIT_PROGRAM, this environment's scripts, or PATH."""
    chosen = os.environ.get("MOEKIT_PROGRAM")
    if chosen:
        return chosen
    for scheme in (sysconfig.get_default_scheme(), f"{os.name}_user"):
        beside = pathlib.Path(sysconfig.get_path("scripts", scheme)) / "moekit"
        if beside.exists():
            return str(beside)
    found = shutil.which("moekit")
    if found is None:
        raise SystemExit("moekit: the program is not installed; set MOEKIT_PROGRAM to its path")
    return found


def run(verb: str) -> None:
    """Replaces this process by ``moekit VERB`` with this process's arguments."""
    path = program()
    try:
        os.execv(path, [path, verb, *sys.argv[1:]])
    except OSError as error:
        raise SystemExit(f"moekit: cannot run {path}: {error.strerror}") from None
