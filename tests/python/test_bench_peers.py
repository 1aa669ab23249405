"""bench --peers: every reason for a peer without a time, and peers that compute the layer's own rows.

No figure here depends on how fast anything is.
"""

import ctypes.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from moekit_program import PROGRAM, moekit

SMALL = "E=8,k=2,H=64,I=32,act=silu,weights=bf16"
HERE = pathlib.Path(__file__).parent
KEYS = {"name", "version", "dtype", "implementation", "time_us", "p5_us", "p95_us", "repeat", "ratio", "rel_rms", "reason"}


def bench(*args, problem=SMALL, tokens="1,24", **environment):
    """The finished process. No Python and no libdnnl unless the environment names them."""
    env = {**os.environ, "MOEKIT_DNNL": "/no/libdnnl.so", "MOEKIT_PYTHON": "/no/python", **environment}
    return moekit("bench", "--problem", problem, "--tokens-list", tokens, "--min-time", "0", "--threads", 2, "--peers", *args,
                  env={k: v for k, v in env.items() if v is not None})


def peers(*args, **environment):
    """{name: entry} of each point."""
    done = bench(*args, "--json", **environment)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    points = [json.loads(line) for line in done.stdout.splitlines()][1:]
    for point in points:
        assert [p["name"] for p in point["peers"]] == ["onednn", "torch"]
        for peer in point["peers"]:
            assert set(peer) == KEYS
            if peer["reason"] is None:
                assert 0 < peer["p5_us"] <= peer["time_us"] <= peer["p95_us"] and peer["repeat"] >= 3
                assert peer["ratio"] == pytest.approx(peer["time_us"] / point["time_us"]["median"])
                assert 0 <= peer["rel_rms"] < {"f32": 1e-3, "bf16": 5 / 256}[peer["dtype"]]
            else:
                assert peer["time_us"] is None and peer["ratio"] is None and peer["repeat"] == 0
    return [{p["name"]: p for p in point["peers"]} for point in points]


@pytest.fixture(scope="module")
def fake_dnnl(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the stand-in of libdnnl")
    library = tmp_path_factory.mktemp("dnnl") / "libdnnl.so"
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", HERE / "fake_dnnl.cc", "-o", library], check=True)
    return str(library)


def installed_dnnl():
    return ctypes.util.find_library("dnnl") or next(iter(sorted(map(str, pathlib.Path("/usr/lib").glob("*/libdnnl.so.[23]")))), None)


@pytest.fixture(scope="module")
def torch_python():
    """A Python that has torch: the one that MOEKIT_TEST_TORCH_PYTHON names, this one, or python3."""
    for python in [os.environ.get("MOEKIT_TEST_TORCH_PYTHON"), sys.executable, shutil.which("python3")]:
        if python and subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip("no Python with torch (MOEKIT_TEST_TORCH_PYTHON may name one)")


def test_without_the_flag_there_are_no_peers():
    done = moekit("bench", "--problem", SMALL, "--tokens-list", "1", "--min-time", "0", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[1])["peers"] == []


def test_nothing_is_there(tmp_path):
    """No Python on PATH or in the working directory, no library: reasons, and status 0."""
    nowhere = {"MOEKIT_PYTHON": None, "PATH": str(tmp_path), "LD_LIBRARY_PATH": ""}
    done = bench("--json", **nowhere)
    assert done.returncode == 0, done.stderr
    for entry in [p for line in done.stdout.splitlines()[1:] for p in json.loads(line)["peers"]]:
        assert entry["time_us"] is None and entry["reason"]
        if entry["name"] == "onednn":
            assert "/no/libdnnl.so" in entry["reason"]
        else:
            assert "no Python with torch" in entry["reason"] and "python3: No such file" in entry["reason"]
            assert ".venv/bin/python" in entry["reason"] and "MOEKIT_PYTHON" in entry["reason"]
    human = bench(**nowhere)
    assert human.returncode == 0 and human.stdout.count("not timed: ") == 4


def test_loader_finds_no_library(tmp_path):
    """Whether libdnnl is installed or not, the default says which."""
    for point in peers(MOEKIT_DNNL=None):
        if point["onednn"]["reason"] is not None:
            assert "libdnnl" in point["onednn"]["reason"] or "oneDNN" in point["onednn"]["reason"]


def test_flags_win_over_the_environment(fake_dnnl):
    for point in peers("--peer-dnnl", "/other/lib.so", "--peer-python", "/other/python", MOEKIT_DNNL=fake_dnnl):
        assert "/other/lib.so" in point["onednn"]["reason"] and "/other/python" in point["torch"]["reason"]


@pytest.mark.parametrize("major", [2, 3])
@pytest.mark.parametrize("problem, dtype", [
    (SMALL, "bf16"), ("E=8,k=2,H=64,I=32,act=silu,weights=f32,activations=f32", "f32"), ("E=8,k=2,H=64,I=32,act=silu,weights=fp8_tensor", "bf16"),
    ("E=5,k=3,H=96,I=48,act=swiglu_oai,bias=both,weights=bf16", "bf16"), ("E=4,k=1,H=64,I=32,act=relu2,weights=bf16", "bf16")])
def test_both_interfaces_of_onednn(fake_dnnl, major, problem, dtype):
    for point in peers(problem=problem, MOEKIT_DNNL=fake_dnnl, FAKE_DNNL=f"major={major}"):
        peer = point["onednn"]
        assert peer["reason"] is None
        assert (peer["version"], peer["dtype"]) == (f"{major}.9.1", dtype)
        assert peer["implementation"] == "matmul per expert, fake:rows"


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2", "silu_nogate", "gelu_nogate"])
def test_activation_functions_of_onednn(fake_dnnl, act):
    """In f32 the stand-in's products are as good as the reference's: what is left is the function."""
    for point in peers(problem=f"E=4,k=2,H=64,I=64,act={act},weights=f32,activations=f32", tokens="16", MOEKIT_DNNL=fake_dnnl):
        assert point["onednn"]["reason"] is None and point["onednn"]["rel_rms"] < 1e-5


def test_onednn_without_bf16_runs_in_f32(fake_dnnl):
    for point in peers(MOEKIT_DNNL=fake_dnnl, FAKE_DNNL="no_bf16"):
        assert point["onednn"]["reason"] is None and point["onednn"]["dtype"] == "f32"


@pytest.mark.parametrize("fake, reason", [
    ("major=4", "only the interfaces of 2.x and 3.x"), ("runtime=1", "without OpenMP"), ("only_ref", "only its reference matmul"),
    ("wrong", "computes something else")])
def test_onednn_that_is_of_no_use(fake_dnnl, fake, reason):
    for point in peers(MOEKIT_DNNL=fake_dnnl, FAKE_DNNL=fake):
        assert reason in point["onednn"]["reason"]


def test_library_that_is_another(fake_dnnl):
    libc = ctypes.util.find_library("c")
    assert "dnnl_version" in peers(tokens="1", MOEKIT_DNNL=libc)[0]["onednn"]["reason"]


def test_slots_without_an_expert(fake_dnnl):
    for point in peers("--routing", "holes", MOEKIT_DNNL=fake_dnnl):
        assert point["onednn"]["reason"] is None


@pytest.mark.parametrize("args, reason", [
    (["--ranks", 2], "one rank"), (["--include", "router"], "--include")])
def test_bench_that_peers_do_not_fit(fake_dnnl, args, reason):
    for point in peers(*args, MOEKIT_DNNL=fake_dnnl):
        assert reason in point["onednn"]["reason"] and reason in point["torch"]["reason"]


def test_latent_layer(fake_dnnl):
    point = peers(problem="E=4,k=2,H=64,I=32,latent=32,act=silu,weights=bf16", tokens="2", MOEKIT_DNNL=fake_dnnl)[0]
    assert "latent" in point["onednn"]["reason"]


def test_installed_onednn():
    library = installed_dnnl()
    if library is None:
        pytest.skip("libdnnl is not installed")
    for point in peers(problem="E=8,k=2,H=256,I=128,act=silu,weights=bf16", MOEKIT_DNNL=library):
        assert point["onednn"]["reason"] is None, point["onednn"]["reason"]


@pytest.mark.parametrize("problem", [
    SMALL, "E=8,k=2,H=128,I=128,act=silu,weights=nvfp4",
    "E=5,k=3,H=96,I=48,act=swiglu_oai,bias=both,weights=bf16", "E=4,k=1,H=64,I=32,act=relu2,weights=bf16"])
def test_torch(torch_python, problem):
    for point in peers(problem=problem, MOEKIT_PYTHON=torch_python):
        assert point["torch"]["reason"] is None, point["torch"]["reason"]
        assert point["torch"]["version"] and point["torch"]["implementation"]


def test_torch_and_slots_without_an_expert(torch_python):
    for point in peers("--routing", "holes", MOEKIT_PYTHON=torch_python):
        assert point["torch"]["reason"] is None, point["torch"]["reason"]


def test_torch_in_bf16(torch_python, tmp_path):
    """The numbers of a CPU with bf16 instructions, on any."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
exec {torch_python} -c "$(printf '%s' "$2" | sed 's/bf16 = bool(.*/bf16 = True/')"
""")
    python.chmod(0o755)
    for point in peers(MOEKIT_PYTHON=str(python)):
        assert point["torch"]["reason"] is None, point["torch"]["reason"]
        assert point["torch"]["dtype"] == "bf16" and point["torch"]["rel_rms"] > 1e-4


@pytest.mark.parametrize("body, reason", [
    ("exit 3", "ended without an answer"), ("read line; echo hello; sleep 1", 'answered "hello"'),
    ("""read line; echo '{"error": "no room"}'; sleep 1""", "no room"),
    ("""read line; echo '{"torch": "9", "bf16": false}'; exec sleep 0""", "ended without an answer")])
def test_python_that_is_of_no_use(tmp_path, body, reason):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    for point in peers(MOEKIT_PYTHON=str(python)):
        assert reason in point["torch"]["reason"]


def test_report_shows_peers(fake_dnnl, tmp_path):
    page = tmp_path / "report.html"
    done = bench("--html", page, MOEKIT_DNNL=fake_dnnl)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "onednn bf16" in text and "<p>Not timed: torch: " in text
    assert "onednn 2.9.1" in done.stdout and "times ours" in done.stdout


# A GPU's torch without a GPU: the child's own script on CPU tensors, with the calls that need one replaced.
GPU_SHIM = """#!{python}
import sys
import torch

script = sys.argv[2]
for text, other in [('torch.device("cuda", gpu)', 'torch.device("cpu")'), ('self.device.type == "cuda"', "True"),
                    ("n, products = 8192, 8", "n, products = 16, 1")]:
    assert script.count(text) == 1, text
    script = script.replace(text, other)


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, other):
        return 0.5


class Graph:
    def replay(self):
        pass


class Capture:
    def __init__(self, graph):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


nothing = lambda *args: None
for name, value in dict(is_available=lambda: True, set_device=nothing, synchronize=nothing, empty_cache=nothing, Event=Event,
                        CUDAGraph=Graph, graph=Capture).items():
    setattr(torch.cuda, name, value)
exec(compile(script, "torch_experts.py", "exec"))
"""
FAKE_CUDA = PROGRAM.resolve().parent / "tests" / "fake_cuda.so"
needs_fake_cuda = pytest.mark.skipif(not FAKE_CUDA.exists(), reason="the tests' fake plug-in was not built")


def bench_on(problem, routing, **environment):
    done = bench("--device", "cuda", "--json", "--routing", routing, problem=problem, MOEKIT_CUDA_PLUGIN=str(FAKE_CUDA), **environment)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[1:]]


@needs_fake_cuda
@pytest.mark.parametrize("problem, routing", [
    (SMALL, "uniform"), (SMALL, "holes"), ("E=5,k=3,H=96,I=64,act=swiglu_oai,bias=both,weights=bf16", "holes"),
    ("E=4,k=1,H=64,I=32,act=relu2,weights=bf16", "hot"), ("E=8,k=2,H=128,I=128,weights=fp8_block,activations=fp8_block", "uniform")])
def test_torch_on_a_gpu(torch_python, tmp_path, problem, routing):
    shim = tmp_path / "python"
    shim.write_text(GPU_SHIM.format(python=torch_python))
    shim.chmod(0o755)
    for point in bench_on(problem, routing, MOEKIT_PYTHON=str(shim)):
        (peer,) = point["peers"]
        assert peer["reason"] is None and peer["dtype"] == "bf16"
        # 500 us a launch.
        assert peer["time_us"] == peer["p5_us"] == peer["p95_us"] == pytest.approx(500 / point["gpu"]["graph_calls"])
        assert peer["repeat"] == 25 and 0 < peer["rel_rms"] < 5 / 256
        assert peer["ratio"] == pytest.approx(peer["time_us"] / point["time_us"]["median"])
        probe = point["probe"]
        if "fp8" in problem and "assumed" in probe["matrix_source"]:
            continue  # this torch has no fp8 product on CPUs
        assert probe["matrix_tflops"] == pytest.approx(2 * 16**3 / 500 * 1e-6)
        assert probe["matrix_source"].startswith("torch fp8" if "fp8" in problem else "torch bf16")
        by_flops = point["flops"] / probe["matrix_tflops"] / 1e6
        assert point["floor_us"] == pytest.approx(max(3 + sum(point["bytes"].values()) / 1e6, by_flops))


@needs_fake_cuda
def test_torch_without_a_gpu_says_so(torch_python):
    for point in bench_on(SMALL, "uniform", MOEKIT_PYTHON=torch_python, CUDA_VISIBLE_DEVICES=""):
        (peer,) = point["peers"]
        assert peer["time_us"] is None and "sees no GPU" in peer["reason"]
        assert "assumed" in point["probe"]["matrix_source"]
