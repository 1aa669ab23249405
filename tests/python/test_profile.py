"""profile: the trace that it writes, and what runs while rows are in flight."""

import itertools
import json

import numpy as np
import pytest

from moekit_program import FIXTURES, json_object, moekit
from tensor_files import read_safetensors

MODEL = FIXTURES / "qwen3moe-bf16-sharded"
SHARED = FIXTURES / "qwen2moe-bf16"  # has shared experts
# Stages that compute; the rest of a thread's spans send, wait or copy.
COMPUTE = {"route", "experts", "shared experts", "reduce", "output"}
OF_EXPERTS, OF_SHARED = {"gemm1", "gemm2", "sum slots"}, {"shared gemm1", "shared gemm2", "shared sum"}
NESTED = OF_EXPERTS | OF_SHARED | {"wait", "copy rows"}
# Microseconds with three digits: what rounding may move an edge by.
EPSILON = 0.002


def traced(tmp_path, *args, model=MODEL):
    path = tmp_path / "trace.json"
    report = json_object("profile", "--model", model, "--trace", path, *args)
    return report, Trace(json.loads(path.read_text()))


class Trace:
    def __init__(self, file):
        self.file = file
        self.names = [e for e in file["traceEvents"] if e["ph"] == "M"]
        self.spans = [e for e in file["traceEvents"] if e["ph"] == "X"]
        begins = {e["id"]: e for e in file["traceEvents"] if e["ph"] == "b"}
        ends = {e["id"]: e for e in file["traceEvents"] if e["ph"] == "e"}
        assert set(begins) == set(ends) and len(begins) == sum(e["ph"] == "b" for e in file["traceEvents"])
        self.windows = [dict(begins[i], end=ends[i]["ts"]) for i in begins]
        for span in self.spans:
            span["end"] = span["ts"] + span["dur"]

    def of(self, name):
        return [s for s in self.spans if s["name"] == name]


def check_spans(trace):
    assert {e["ph"] for e in trace.file["traceEvents"]} <= {"M", "X", "b", "e"}
    for span in trace.spans + trace.windows:
        assert 0 <= span["ts"] <= span["end"]
        assert span["args"]["call"] >= 0 and span["args"]["microbatch"] >= 0
    # On one track two spans are apart, or one lies in the other.
    for _, track in itertools.groupby(sorted(trace.spans, key=lambda s: (s["pid"], s["tid"], s["ts"], -s["end"])),
                                      key=lambda s: (s["pid"], s["tid"])):
        open_spans = []
        for span in track:
            while open_spans and open_spans[-1]["end"] <= span["ts"] + EPSILON:
                open_spans.pop()
            if open_spans:
                assert span["end"] <= open_spans[-1]["end"] + EPSILON, (span, open_spans[-1])
                assert span["name"] in NESTED
            open_spans.append(span)


def overlap(span, window):
    return min(span["end"], window["end"]) - max(span["ts"], window["ts"])


def test_trace_of_two_ranks(tmp_path):
    report, trace = traced(tmp_path, "--random", 24, "--ranks", 2, "--repeat", 3, "--prepare", "all2all")
    check_spans(trace)
    assert {(e["name"], e["pid"], e["args"]["name"]) for e in trace.names} >= {
        ("process_name", 0, "rank 0"), ("process_name", 1, "rank 1"), ("thread_name", 0, "thread 0")}
    for name in ["route", "dispatch send", "dispatch receive", "experts", "combine send", "combine receive", "output"]:
        assert len(trace.of(name)) == 2 * 3, name
    assert len(trace.windows) == 2 * 3 * 2
    assert {w["name"] for w in trace.windows} == {"rows in flight", "results in flight"}
    # 8 experts, top 3, H = 128, in both directions; each rank has 12 tokens.
    for call in range(1, 4):
        of_call = [s for s in trace.spans if s["args"]["call"] == call]
        experts = [s["args"] for s in of_call if s["name"] == "experts"]
        assert sum(a["rows"] for a in experts) == 24 * 3
        assert all(0 < a["experts"] <= 4 for a in experts)
        back = [s["args"] for s in of_call if s["name"] == "combine send"]
        assert sum(a["rows"] for a in back) == 24 * 3
        assert sum(a["bytes"] + a["own_bytes"] for a in back) == 24 * 3 * 128 * 4
        out = [s["args"] for s in of_call if s["name"] == "dispatch send"]
        assert sum(a["rows"] for a in out) == sum(a["tokens"] for a in experts)
        assert all(a["tokens"] == 12 and a["bytes"] > 0 for a in out)
    assert report["spans_lost"] == 0 and report["microbatches"] == 1
    assert len(report["time_us"]) and report["time_us"]["repeat"] == 3


def test_second_microbatch_runs_while_the_first_is_in_flight(tmp_path):
    _, trace = traced(tmp_path, "--random", 64, "--ranks", 2, "--microbatches", 2, "--repeat", 4)
    check_spans(trace)
    for rank in range(2):
        mine = [s for s in trace.spans if s["pid"] == rank and s["tid"] == 0]
        for window in [w for w in trace.windows if w["pid"] == rank]:
            other = [s for s in mine if s["args"]["microbatch"] != window["args"]["microbatch"]]
            computed = [s for s in other if s["name"] in COMPUTE and overlap(s, window) > 0]
            whole = [s for s in computed if s["ts"] >= window["ts"] - EPSILON and s["end"] <= window["end"] + EPSILON]
            kind = (window["name"], window["args"]["microbatch"])
            if kind in {("rows in flight", 1), ("results in flight", 0)}:
                # The first one's experts while the second one's rows travel, and the other way round.
                assert "experts" in {s["name"] for s in whole}, kind
            if kind == ("rows in flight", 0):
                assert "route" in {s["name"] for s in whole}, kind
        # The two are under way together, call after call.
        for call in {w["args"]["call"] for w in trace.windows}:
            first, second = ([w for w in trace.windows if w["pid"] == rank and w["args"]["call"] == call
                              and w["args"]["microbatch"] == m and w["name"] == "rows in flight"] for m in [0, 1])
            assert len(first) == len(second) == 1
            assert overlap(first[0], second[0]) > 0


def test_shared_experts_run_while_results_are_in_flight(tmp_path):
    _, trace = traced(tmp_path, "--random", 16, "--ranks", 2, "--repeat", 3, model=SHARED)
    check_spans(trace)
    shared = trace.of("shared experts")
    assert len(shared) == 2 * 3
    for span in shared:
        inside = [w for w in trace.windows if w["pid"] == span["pid"] and w["args"]["call"] == span["args"]["call"]
                  and w["name"] == "results in flight"]
        assert len(inside) == 1
        assert inside[0]["ts"] - EPSILON <= span["ts"] and span["end"] <= inside[0]["end"] + EPSILON


def test_products_of_shared_experts_have_names_of_their_own(tmp_path):
    report, trace = traced(tmp_path, "--random", 16, "--repeat", 3, "--threads", 1, model=SHARED)
    for step, nested in [("experts", OF_EXPERTS), ("shared experts", OF_SHARED)]:
        steps = trace.of(step)
        for name in nested:
            for span in trace.of(name):
                assert any(s["ts"] - EPSILON <= span["ts"] and span["end"] <= s["end"] + EPSILON for s in steps), name
    stages = {s["stage"]: s for s in report["stages"]}
    assert {"gemm1", "gemm2", "shared gemm1", "shared gemm2"} <= set(stages)
    for name in ["gemm1", "gemm2", "shared gemm1", "shared gemm2"]:
        assert stages[name]["spans"] == 3 and stages[name]["kind"] == "nested"


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_microbatches_never_change_bits(microbatches, tokens, tmp_path):
    outputs = []
    for parts in [1, microbatches]:
        file = tmp_path / f"{parts}.safetensors"
        traced(tmp_path, "--random", tokens, "--ranks", 2, "--microbatches", parts, "--output", file)
        outputs.append(read_safetensors(file))
    for name in outputs[0]:
        np.testing.assert_array_equal(outputs[0][name], outputs[1][name], err_msg=name)


def test_threads_have_tracks(tmp_path):
    _, trace = traced(tmp_path, "--random", 64, "--threads", 2, "--repeat", 5)
    check_spans(trace)
    # A worker that sleeps longer than a call takes no part in it.
    assert {0} <= {s["tid"] for s in trace.of("gemm1")} <= {0, 1}
    assert {s["tid"] for s in trace.of("experts")} == {0}
    assert not trace.windows  # one rank: nothing travels


def test_summary_adds_up(tmp_path):
    report, trace = traced(tmp_path, "--random", 24, "--ranks", 2, "--repeat", 2)
    stages = {s["stage"]: s for s in report["stages"]}
    assert sum(s["share"] for s in stages.values() if s["kind"] == "step") == pytest.approx(1)
    for name, stage in stages.items():
        spans = [s for s in trace.spans + [dict(w, dur=w["end"] - w["ts"]) for w in trace.windows]
                 if s["name"] == name and s["tid"] == 0]
        assert stage["spans"] == len(spans)
        assert stage["total_us"] == pytest.approx(sum(s["dur"] for s in spans), abs=EPSILON * len(spans))
        assert stage["mean_us"] <= stage["max_us"] + 1e-9 and stage["mean_us"] * 2 == pytest.approx(stage["total_us"])
    text = moekit("profile", "--model", MODEL, "--ranks", 2).stdout
    assert "dispatch send" in text and " %" in text


def test_profile_says_what_run_says(tmp_path):
    run = json_object("run", "--model", MODEL, "--random", 9, "--ranks", 2)
    profile = json_object("profile", "--model", MODEL, "--random", 9, "--ranks", 2)
    assert set(run) <= set(profile)
    for key in set(run) - {"time_us", "load"}:  # one more call, not recorded
        assert profile[key] == run[key], key
    assert profile["trace"] is None


def test_a_long_run_keeps_the_last_calls(tmp_path):
    report, trace = traced(tmp_path, "--random", 1, "--repeat", 20000, "--threads", 1)
    check_spans(trace)
    assert report["spans_lost"] == trace.file["otherData"]["spans_lost"] > 0
    assert max(s["args"]["call"] for s in trace.spans) == 20000


@pytest.mark.parametrize("trace", ["no/such/folder/t.json", "."])
def test_a_path_that_cannot_be_written(trace, tmp_path):
    done = moekit("profile", "--model", MODEL, "--trace", tmp_path / trace)
    assert done.returncode == 2 and done.stderr.startswith("moekit: invalid_argument: --trace ")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_no_trace(tmp_path):
    done = moekit("profile", "--model", MODEL, "--random", 64, "--capacity", "refuse:8", "--trace", tmp_path / "t.json")
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prepare", ["all2all", "hierarchical", "push"])
def test_as_many_microbatches_as_the_flag_takes(prepare):
    args = ["profile", "--model", MODEL, "--random", 40, "--ranks", 3, "--nodes", 2, "--prepare", prepare, "--json"]
    assert json.loads(moekit(*args, "--microbatches", 8).stdout)["microbatches"] == 8
