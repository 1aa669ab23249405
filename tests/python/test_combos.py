"""combos: the cases that it takes, what it says of them, and that each can be run again."""

import pytest

from moekit_program import json_lines, json_object, moekit

SPEC = "E=8,k=2,H=128,I=64,act=silu,weights=fp8_block,activations=fp8_token,tokens=5,routing=hot,placement=replicas"
KEYS = {"prepare", "experts", "problem", "ranks", "verdict", "reasons", "rel_rms"}


def members(kind):
    report = json_object("explain", "--problem", "E=2,k=1,H=64,I=32")
    return [c["name"] for c in report["candidates"] if c["kind"] == kind]


@pytest.fixture(scope="module")
def cover():
    return json_lines("combos", "--ranks", 3, "--combine", "slots", "--wire", "auto")


def test_cover_lines(cover):
    for line in cover:
        assert set(line) >= KEYS
        assert line["verdict"] in {"passed", "refused"}, line
        assert (line["verdict"] == "passed") != bool(line["reasons"])
        if line["verdict"] == "passed":
            assert line["same_bits"] and line["worst_row_rms"] <= line["bound"]
            assert line["rel_rms"] >= 0
        else:
            assert line["rel_rms"] is None
        assert line["ranks"] == 3 and "weights=" in line["problem"]


def test_cover_has_every_pair(cover):
    pairs = {(line["prepare"], line["experts"]) for line in cover}
    assert pairs == {(p, e) for p in members("prepare") for e in members("experts")}
    passed = {(line["prepare"], line["experts"]) for line in cover if line["verdict"] == "passed"}
    assert passed >= {("all2all", "cpu"), ("allgather", "cpu"), ("low_latency", "cpu_batched"), ("all2all", "ref")}


def test_cover_brings_every_value_together(cover):
    """What a pair, a format, a load and a placement have in common is a case that ran."""
    seen = [(line["prepare"] + "/" + line["experts"], dict(item.split("=", 1) for item in line["problem"].split(",")))
            for line in cover if line["verdict"] == "passed"]
    pairs = {pair for pair, _ in seen}
    weights = {spec["weights"] for _, spec in seen}
    activations = {spec.get("activations", "bf16") for _, spec in seen}
    placements = {spec.get("placement", "linear") for _, spec in seen}
    routings = {spec.get("routing", "uniform") for _, spec in seen}
    assert len(weights) >= 14 and len(activations) >= 10
    assert placements == {"linear", "round_robin", "replicas"}
    assert routings == {"uniform", "hot", "one_rank", "zipf:1.5", "holes"}
    assert {(p, s["weights"]) for p, s in seen} == {(p, w) for p in pairs for w in weights}
    assert {(p, s.get("activations", "bf16")) for p, s in seen} == {(p, a) for p in pairs for a in activations}
    assert {(s["weights"], s.get("activations", "bf16")) for _, s in seen} == {
        (w, a) for w in weights for a in activations}
    tokens = {line["tokens_total"] for line in cover}
    assert {0, 1, 3, 39} <= tokens  # none, one in all, one a rank, odd


def test_cover_is_the_same_every_time():
    args = ["combos", "--experts", "cpu", "--prepare", "all2all", "--ranks", 2]
    assert json_lines(*args) == json_lines(*args)
    assert json_lines(*args) != json_lines(*args, "--seed", 1)


def test_a_named_pair_runs_alone():
    lines = json_lines("combos", "--prepare", "all2all", "--experts", "cpu", "--problem", SPEC, "--ranks", 2)
    assert {(line["prepare"], line["experts"], line["ranks"]) for line in lines} == {("all2all", "cpu", 2)}
    # Wire, combine and its dtype vary.
    assert len({line["flags"] for line in lines}) >= 7 * 2
    one = json_lines("combos", "--prepare", "all2all", "--experts", "cpu", "--problem", SPEC, "--ranks", 2, "--wire",
                     "auto", "--combine", "slots", "--combine-dtype", "f32")
    assert len(one) == 1 and one[0]["verdict"] == "passed"


def test_a_case_can_be_run_again(cover):
    lines = [line for line in cover if line["verdict"] == "passed" and line["rel_rms"] > 0][::40]
    lines += [line for line in cover if "--tokens-total" in line["flags"]][:2]
    lines += [line for line in cover if line["verdict"] == "refused"][:2]
    assert len(lines) >= 5
    for line in lines:
        again = json_lines("combos", "--problem", line["problem"], *line["flags"].split())
        assert again == [line]


def test_refused_alone_leaves_status_0():
    done = moekit("combos", "--prepare", "local", "--experts", "cpu", "--problem", SPEC, "--ranks", 2)
    assert done.returncode == 0
    assert "serves one rank" in done.stdout and " 0 failed" in done.stdout


def test_full_is_the_product():
    lines = json_lines("combos", "--full", "--prepare", "all2all", "--experts", "cpu", "--problem", SPEC)
    assert len(lines) == 8 * 7 * 2 * 2  # groups of ranks, wires, combine kinds, dtypes
    assert {line["ranks"] for line in lines} == {1, 2, 3, 4, 7}
    # Half of 64 columns is no whole block of fp8_block: slices are refused, whole experts pass.
    assert {line["verdict"] for line in lines if "--tp" in line["flags"]} == {"refused"}
    whole = [line for line in lines if "--tp" not in line["flags"]]
    assert {line["verdict"] for line in whole} == {"passed"}
    assert all(line["same_bits"] for line in whole if "--combine slots" in line["flags"])


def test_human_table():
    done = moekit("combos", "--prepare", "all2all", "--problem", SPEC, "--ranks", 2)
    assert done.returncode == 0 and done.stderr == ""
    assert "worst of bound" in done.stdout and "refused, and one case of each:" in done.stdout
    assert "--problem E=8" in done.stdout


@pytest.mark.parametrize("args", [
    ["--prepare", "no_such"], ["--experts", "no_such"], ["--experts", "cpu", "--backend", "ref"],
    ["--tokens-total", "3"], ["--capacity", "drop:5"], ["--problem", "E=8"], ["--ranks", "0"]])
def test_wrong_arguments(args):
    done = moekit("combos", *args)
    assert done.returncode == 2
    assert done.stderr.startswith("moekit: invalid_argument: ") and done.stderr.count("\n") == 1
