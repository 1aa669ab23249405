"""The Python blocks of README.md and docs/python.md run as they stand, outside the source tree, on a small model."""

import os
import re
import subprocess
import sys

import pytest
from moekit_program import FIXTURES, ROOT

BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("README.md", "docs/python.md")
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S))
    if "import moekit" in block  # others are for code that the reader has
]


def run_outside(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not environment.get("MOEKIT_TEST_INSTALLED"):
        environment["PYTHONPATH"] = str(ROOT / "python")
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block, tmp_path):
    for package in ("torch", "transformers"):
        if re.search(rf"^(import|from) {package}\b", block, re.M):
            pytest.importorskip(package, reason=f"{package} is not installed")
    text = re.sub(r'"/models/[^"]*"', repr(str(FIXTURES / "qwen3moe-bf16-sharded")), block)
    done = run_outside([sys.executable, "-c", text], tmp_path)
    assert done.returncode == 0, done.stderr


def test_numpy_example(tmp_path):
    done = run_outside([sys.executable, str(ROOT / "examples" / "python" / "numpy_only.py")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the same bits" in done.stdout


@pytest.mark.parametrize("name", ["torch_compile.py", "transformers_swap.py"])
def test_torch_examples(name, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    more = ["--backend", "aot_eager"]
    if name == "transformers_swap.py":
        pytest.importorskip("transformers", minversion="5.17", reason="transformers 5.17 is not installed")
        more = ["--new-tokens", "4"]
    done = run_outside([sys.executable, str(ROOT / "examples" / "python" / name), *more], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["doctor", "bench"])
def test_modules_mirror_the_program(verb, tmp_path):
    done = run_outside([sys.executable, "-m", f"moekit.{verb}", "--help"], tmp_path)
    assert done.returncode == 0 and f"moekit {verb}" in done.stdout
    wrong = run_outside([sys.executable, "-m", f"moekit.{verb}", "--no-such-flag"], tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith("moekit: invalid_argument: ")


def test_import_needs_no_torch(tmp_path):
    code = "import sys, moekit; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = run_outside([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
