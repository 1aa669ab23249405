"""Plans for GPUs: what explain says of each CUDA member with and without the plug-in, and of names that no GPU has."""

import json
import os

import pytest

from moekit_program import FIXTURES, PROGRAM, moekit

MODEL = FIXTURES / "qwen3moe-bf16-sharded"
FAKE = PROGRAM.resolve().parent / "tests" / "fake_cuda.so"
MEMBERS = ["sm90", "cuda_decode", "cuda_ref"]
BF16 = "E=16,k=4,H=128,I=256,tokens=64"
NO_CUDA = "this build has no CUDA: configure with -DMOEKIT_CUDA=ON"


def explain(plugin, *flags, problem=BF16):
    env = dict(os.environ, MOEKIT_CUDA_PLUGIN=str(plugin))
    done = moekit("explain", "--problem", problem, "--device", "cuda", "--json", *flags, env=env)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stderr
    report = json.loads(lines[0])
    return done, report, {c["name"]: c for c in report["candidates"] if c["kind"] == "experts"}


@pytest.fixture
def no_plugin(tmp_path):
    return tmp_path / "libmoekit_cuda.so"


needs_fake = pytest.mark.skipif(not FAKE.exists(), reason="the tests' fake plug-in was not built")


@pytest.mark.parametrize("arch", ["90a", "100a", "120a"])
def test_every_member_gives_its_reasons_without_a_gpu(no_plugin, arch):
    done, report, experts = explain(no_plugin, "--arch", arch, problem=BF16 + ",weights=nvfp4,activations=nvfp4")
    assert done.returncode == 3 and report["chosen"] is None
    for name in MEMBERS:
        reasons = experts[name]["reasons"]
        assert not experts[name]["supported"]
        assert any("plug-in does not load" in r for r in reasons), reasons
    sm90 = " | ".join(experts["sm90"]["reasons"])
    assert "takes nvfp4 weights with bf16 activations (--activations bf16); this layer has nvfp4 weights with nvfp4" in sm90
    assert ("made for 90a" in sm90) == (arch != "90a")
    assert "at most 8 fit" in " | ".join(experts["cuda_decode"]["reasons"])
    assert len(experts["cuda_ref"]["reasons"]) == 1
    assert experts["cpu"]["reasons"] == ["runs on the CPU, the plan asks for CUDA device 0"]


def test_a_build_without_cuda_says_how_to_get_it():
    env = {k: v for k, v in os.environ.items() if k != "MOEKIT_CUDA_PLUGIN"}
    done = moekit("explain", "--problem", BF16, "--device", "cuda", "--arch", "90a", "--json", env=env)
    if (PROGRAM.resolve().parent / "lib" / "libmoekit_cuda.so").exists():
        pytest.skip("this build has CUDA")
    assert done.returncode == 3
    experts = {c["name"]: c for c in json.loads(done.stdout)["candidates"]}
    assert experts["sm90"]["reasons"] == [NO_CUDA + ", which needs nvcc 13"]
    parts = {c["name"]: c for c in json.loads(moekit("doctor", "--json", env=env).stdout)["components"]}
    assert not parts["cuda plug-in"]["found"] and parts["cuda plug-in"]["detail"]
    text = moekit("doctor", env=env).stdout
    assert "no CUDA plug-in" in text and "MOEKIT_CUDA=ON" in text


@needs_fake
def test_explain_chooses_by_arch_format_and_tokens():
    for arch, problem, chosen in [
        ("90a", BF16, "sm90"),
        ("90a", BF16 + ",weights=fp8_block,activations=fp8_block", "sm90"),
        ("90a", BF16 + ",weights=mxfp4", "sm90"),
        ("90a", BF16 + ",weights=nvfp4", "sm90"),
        ("90a", BF16 + ",weights=mxfp8", "sm90"),
        ("90a", BF16 + ",weights=mxfp8,activations=mxfp8", "cuda_ref"),
        ("90a", BF16 + ",weights=mxfp8_e5m2", "cuda_ref"),
        ("100a", "E=16,k=4,H=128,I=256,tokens=8,weights=mxfp4", "cuda_decode"),
        ("100a", BF16, "cuda_ref"),
        ("100a", "E=16,k=4,H=128,I=256,tokens=8", "cuda_decode"),
        ("120a", BF16, "cuda_ref"),
        ("90a", BF16 + ",weights=int4_g32", None),
        ("103a", BF16, None),
    ]:
        done, report, experts = explain(FAKE, "--arch", arch, problem=problem)
        assert done.returncode == (0 if chosen else 3), (arch, problem)
        assert (report["chosen"] or {"backend": None})["backend"] == chosen
        for name in MEMBERS:
            assert experts[name]["supported"] != bool(experts[name]["reasons"])
    _, report, _ = explain(FAKE, "--arch", "90a")
    assert [b["knobs"] for b in report["plan"]["buckets"]] == ["chain=decode", "chain=decode", "chain=split"]
    _, report, _ = explain(FAKE, "--arch", "90a", "--batch-invariant")
    assert {b["knobs"] for b in report["plan"]["buckets"]} == {"chain=split"}


@needs_fake
@pytest.mark.parametrize("name", ["gptoss-mxfp4", "gptoss-ct-nvfp4a16", "gptoss-modelopt-nvfp4", "mixtral-ct-nvfp4",
                                  "deepseekv3-modelopt-nvfp4", "nemotronh-ct-nvfp4", "qwen3moe-ct-mxfp4",
                                  "qwen3moe-ct-mxfp8", "qwen3moe-modelopt-mxfp8", "qwen3moe-ct-nvfp4"])
def test_checkpoints_of_four_and_eight_bits_are_sm90s(name):
    env = dict(os.environ, MOEKIT_CUDA_PLUGIN=str(FAKE))
    flags = ["--model", FIXTURES / name, "--device", "cuda", "--activations", "bf16"]
    done = moekit("explain", *flags, "--arch", "90a", "--json", env=env)
    assert done.returncode == 0, done.stderr
    for report in map(json.loads, done.stdout.splitlines()):
        assert report["chosen"]["backend"] == "sm90"
        assert report["plan"]["weight_layout"] == "cuda_panels"
        experts = {c["name"]: c for c in report["candidates"] if c["kind"] == "experts"}
        assert "panels" in experts["sm90"]["note"]
    done = moekit("check", *flags, "--random", 5, "--json", env=env)
    assert done.returncode == 0, done.stderr
    for line in map(json.loads, done.stdout.splitlines()):
        if line["backend"] in ("sm90", "cuda_decode"):
            assert line["supported"] and line["passed"], line


@needs_fake
def test_run_and_check_reach_the_plug_in(tmp_path):
    env = dict(os.environ, MOEKIT_CUDA_PLUGIN=str(FAKE))
    done = moekit("run", "--model", MODEL, "--device", "cuda", "--json", env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "sm90" and report["output"]["nan_count"] == 0
    done = moekit("check", "--model", MODEL, "--device", "cuda", "--json", "--random", 8, env=env)
    assert done.returncode == 0, done.stderr
    lines = {line["backend"]: line for line in map(json.loads, done.stdout.splitlines())}
    for name in MEMBERS:
        assert lines[name]["supported"] and lines[name]["passed"], lines[name]
        assert lines[name]["worst_row_rms"] < 0.01
    assert not lines["cpu"]["supported"]


def test_wrong_archs_are_2():
    for flags in [["--arch", "90a"], ["--arch", "90a", "--device", "cpu"], ["--arch", "77", "--device", "cuda"],
                  ["--arch", "sm_90", "--device", "cuda"], ["--arch", "80a", "--device", "cuda"]]:
        done = moekit("explain", "--problem", BF16, *flags)
        assert done.returncode == 2, flags
        assert done.stderr.startswith("moekit: invalid_argument: ") and done.stdout == ""
    done = moekit("run", "--model", MODEL, "--device", "cuda", "--arch", "90a")
    assert done.returncode == 2 and "explain" in done.stderr


def test_bench_times_the_cpu_only():
    done = moekit("bench", "--problem", BF16, "--device", "cuda")
    assert done.returncode == 3 and "bench_cuda" in done.stderr


@needs_fake
def test_a_layer_that_nothing_takes_is_not_checked():
    env = dict(os.environ, MOEKIT_CUDA_PLUGIN=str(FAKE))
    done = moekit("check", "--model", FIXTURES / "mixtral-ct-nvfp4", "--device", "cuda", "--json", "--random", 3, env=env)
    assert done.returncode == 3
    assert "nothing was checked of layer 0" in done.stderr
    assert not any(json.loads(line)["supported"] for line in done.stdout.splitlines())
