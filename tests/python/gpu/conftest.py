"""The package of this checkout over the libraries of its build, unless MOEKIT_TEST_INSTALLED asks for an installed one."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "tests" / "python" / "pkg")]

if not os.environ.get("MOEKIT_TEST_INSTALLED"):
    sys.path.insert(0, str(ROOT / "python"))
    os.environ.setdefault("MOEKIT_LIBRARY", str(ROOT / "build" / "lib" / "libmoekit.so.1"))

from call_path import call_path  # noqa: E402, F401 (a fixture of all tests here)
