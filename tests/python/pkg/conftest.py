"""The package of this checkout over the library of its build, unless MOEKIT_TEST_INSTALLED asks for an installed one."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "python"))

if not os.environ.get("MOEKIT_TEST_INSTALLED"):
    sys.path.insert(0, str(ROOT / "python"))
    os.environ.setdefault("MOEKIT_LIBRARY", str(ROOT / "build" / "lib" / "libmoekit.so.1"))
    os.environ.setdefault("MOEKIT_PROGRAM", str(ROOT / "build" / "moekit"))

from call_path import call_path  # noqa: E402, F401 (a fixture of all tests here)
