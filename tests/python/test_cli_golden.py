"""Every fixture through the program: rows against golden outputs, bits against other rank counts."""

import numpy as np
import pytest

from moekit_program import FIXTURES, json_lines, json_object, moekit
from tensor_files import read_safetensors, row_errors, write_safetensors

NAMES = sorted(p.parent.name for p in FIXTURES.glob("*/golden.safetensors"))


def layers_of(golden):
    return sorted({int(name.split(".")[0].removeprefix("layer")) for name in golden})


CASES = [(name, layer) for name in NAMES for layer in layers_of(read_safetensors(FIXTURES / name / "golden.safetensors"))]


class Golden:
    """One layer of a fixture and what its tool computed."""

    def __init__(self, name, layer):
        self.model = FIXTURES / name
        self.file = self.model / "golden.safetensors"
        self.layer = layer
        self.tensors = read_safetensors(self.file)

    def __getitem__(self, key):
        return self.tensors[f"layer{self.layer}.{key}"]

    def __contains__(self, key):
        return f"layer{self.layer}.{key}" in self.tensors

    def args(self):
        return ["--model", self.model, "--layer", self.layer, "--tokens", f"{self.file}:layer{self.layer}.input"]

    def run(self, tmp_path, *args):
        """Tensors of a run on the golden input."""
        out = tmp_path / "out.safetensors"
        json_object("run", *self.args(), "--output", out, *args)
        return read_safetensors(out)


@pytest.fixture(params=CASES, ids=[f"{name}-{layer}" for name, layer in CASES])
def golden(request):
    return Golden(*request.param)


def experts_of(golden):
    return golden["router_logits"].shape[1]


def test_reference_gives_the_golden_rows_on_any_rank_count(golden, tmp_path):
    outputs = []
    for ranks in [1, 2, experts_of(golden)]:
        out = golden.run(tmp_path, "--activations", "f32", "--backend", "ref", "--ranks", ranks)
        assert row_errors(out["output"], golden["output"]).max() <= 1e-5
        outputs.append(out["output"])
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0].view(np.uint32), other.view(np.uint32))


def test_router_gives_the_golden_choice(golden, tmp_path):
    out = golden.run(tmp_path, "--activations", "f32")
    assert row_errors(out["router_logits"], golden["router_logits"]).max() <= 1e-5
    # In a row of zeros a router without bias has equal logits: any choice is right there.
    rows = np.abs(golden["input"]).sum(axis=1) > 0
    np.testing.assert_array_equal(out["topk_ids"][rows], golden["topk_ids"][rows])
    np.testing.assert_allclose(out["topk_weights"][rows], golden["topk_weights"][rows], rtol=1e-5)


def test_cpu_back_end_stays_near_the_golden_rows(golden, tmp_path):
    exact = golden.run(tmp_path, "--activations", "f32", "--backend", "cpu")
    assert row_errors(exact["output"], golden["output"]).max() <= 1e-5
    rounded = golden.run(tmp_path, "--activations", "bf16", "--backend", "cpu")
    assert row_errors(rounded["output"], golden["output"]).max() <= 1e-2


# Only some tools can emulate their activations on a CPU.
EMULATED = [case for case in CASES if "output_actq" in Golden(*case)]


@pytest.mark.parametrize("case", EMULATED, ids=[name for name, _ in EMULATED])
def test_quantized_activations_follow_the_tools_chain(case, tmp_path):
    golden = Golden(*case)
    for backend in ["ref", "cpu"]:
        out = golden.run(tmp_path, "--activations", "checkpoint", "--backend", backend)
        # Values on a rounding boundary may fall either way: 4e-4 in the worst row of an independent reader.
        assert row_errors(out["output"], golden["output_actq"]).max() <= 2e-3


def test_check_passes_with_and_without_golden(golden):
    lines = json_lines("check", *golden.args(), "--activations", "f32",
                       "--golden", f"{golden.file}:layer{golden.layer}.output")
    assert {line["backend"] for line in lines if line["supported"]} >= {"ref", "cpu"}
    for line in lines:
        if line["supported"]:
            assert line["passed"] and line["worst_row_rms"] <= line["bound"]
            assert line["golden_worst_row_rms"] <= line["golden_bound"]
    for ranks in [1, 3]:
        lines = json_lines("check", *golden.args(), "--ranks", ranks)
        assert all(line["passed"] for line in lines if line["supported"])


def test_check_of_all_layers():
    lines = json_lines("check", "--model", FIXTURES / "qwen3moe-bf16-sharded", "--all-layers", "--random", 5)
    assert {line["layer"] for line in lines} == {0, 1}
    assert all(line["passed"] for line in lines if line["supported"])


def test_a_wrong_golden_fails_the_check(tmp_path):
    golden = Golden("mixtral-bf16", 0)
    wrong = golden["output"].copy()
    wrong[3] *= 1.5
    write_safetensors(tmp_path / "wrong.safetensors", {"wrong": wrong})
    done = moekit("check", *golden.args(), "--golden", tmp_path / "wrong.safetensors", "--json")
    assert done.returncode == 1
    assert '"passed":false' in done.stdout and done.stderr == ""


def test_a_golden_that_cannot_be_judged_says_so():
    golden = Golden("qwen3moe-ct-nvfp4", 0)  # static input scales, which may saturate
    command = ["check", *golden.args(), "--golden", f"{golden.file}:layer0.output"]
    text = moekit(*command).stdout
    assert "passed, golden not judged" in text and "The golden was NOT judged" in text
    lines = [line for line in json_lines(*command) if line["supported"]]
    assert lines and all(line["golden_bound"] is None and line["golden_judged"] is False for line in lines)
    lines = [line for line in json_lines(*command, "--activations", "f32") if line["supported"]]
    assert lines and all(line["passed"] and line["golden_judged"] for line in lines)


def test_nan_and_infinity_touch_their_rows_only(tmp_path):
    golden = Golden("mixtral-bf16", 0)
    x = golden["input"].copy()
    clean = golden.run(tmp_path, "--activations", "f32")["output"]
    x[2, 5] = np.nan
    x[7, 0] = np.inf
    write_safetensors(tmp_path / "x.safetensors", {"x": x})
    out = tmp_path / "bad.safetensors"
    for ranks in [1, 2]:
        report = json_object("run", "--model", golden.model, "--tokens", tmp_path / "x.safetensors", "--activations",
                             "f32", "--output", out, "--ranks", ranks)
        assert report["output"]["nan_count"] > 0
        output = read_safetensors(out)["output"]
        rest = [r for r in range(17) if r not in (2, 7)]
        np.testing.assert_array_equal(output[rest], clean[rest])
        assert not np.isfinite(output[2]).all() and not np.isfinite(output[7]).all()
    lines = json_lines("check", "--model", golden.model, "--tokens", tmp_path / "x.safetensors")
    assert all(line["passed"] for line in lines if line["supported"])
