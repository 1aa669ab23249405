"""The verbs of the program: what they print, what they write, and what may not change it."""

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from moekit_program import FIXTURES, json_lines, json_object, moekit
from tensor_files import read_safetensors, row_errors, write_safetensors

MODEL = FIXTURES / "qwen3moe-bf16-sharded"
SMALL = "E=8,k=2,H=64,I=32,act=silu,weights=bf16"
VERBS = ["inspect", "run", "check", "explain", "bench", "combos", "profile", "quantize", "doctor"]


def test_help_names_every_verb():
    done = moekit("--help")
    assert done.returncode == 0
    for verb in VERBS:
        assert verb in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_shows_an_example(verb):
    done = moekit(verb, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert f"Example:\n  moekit {verb}" in done.stdout


def test_version():
    done = moekit("--version")
    assert done.returncode == 0 and done.stdout.startswith("moekit ")


def test_no_colour_and_no_progress_when_piped():
    for args in [["inspect", MODEL], ["run", "--model", MODEL], ["check", "--model", MODEL], ["explain", "--model", MODEL]]:
        done = moekit(*args)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "" and "\x1b" not in done.stdout and "\r" not in done.stdout
        assert done.stdout.strip()


def test_log_and_verbose(tmp_path):
    log = tmp_path / "run.log"
    done = moekit("run", "--model", MODEL, "--log", log)
    assert done.returncode == 0 and done.stderr == ""
    assert "debug" in log.read_text()
    done = moekit("run", "--model", MODEL, "--verbose")
    assert "moekit: debug: " in done.stderr


def test_inspect():
    report = json_object("inspect", MODEL)
    assert report["family"] == "qwen3_moe"
    assert set(report) >= {"family", "layers", "conventions", "ignored"}
    layer = report["layers"][0]
    assert set(layer) >= {"index", "kind", "experts", "top_k", "hidden", "intermediate", "activation",
                          "shared_experts", "scheme", "bytes"}
    assert (layer["experts"], layer["top_k"], layer["hidden"], layer["intermediate"]) == (8, 3, 128, 32)
    assert layer["scheme"] == {"weights": "bf16", "activations": "bf16"}
    assert layer["bytes"] >= 8 * 3 * 128 * 32 * 2


def test_inspect_of_a_mixed_model():
    report = json_object("inspect", FIXTURES / "deepseekv3-ct-nvfp4", "--tensors")
    kinds = {layer["index"]: layer["kind"] for layer in report["layers"]}
    assert kinds[0] == "dense" and kinds[1] == "moe"
    assert report["layers"][1]["scheme"]["weights"] == "nvfp4"
    assert report["layers"][1]["shared_experts"] > 0
    names = {t["name"] for t in report["tensors"]}
    assert "model.layers.1.mlp.experts.0.gate_proj.weight_packed" in names


def test_run_reports():
    report = json_object("run", "--model", MODEL, "--layer", 1, "--random", 5, "--ranks", 2, "--repeat", 3)
    assert set(report) >= {"model", "family", "layer", "scheme", "activations", "tokens", "ranks", "backend", "prepare",
                           "transport", "plan", "time_us", "output", "dropped"}
    assert set(report["plan"]) >= {"hash", "weights_bytes", "workspace_bytes", "wire_bytes", "reduce_duty", "quant_duty",
                                   "knobs"}
    assert (report["layer"], report["tokens"], report["ranks"], report["transport"]) == (1, 5, 2, "threads")
    time = report["time_us"]
    assert time["repeat"] == 3 and 0 < time["min"] <= time["median"] <= time["max"]
    assert report["output"]["rms"] > 0 and report["output"]["nan_count"] == 0 and report["dropped"] == 0


def run_output(tmp_path, *args, name="out.safetensors"):
    json_object("run", "--model", MODEL, "--output", tmp_path / name, *args)
    return read_safetensors(tmp_path / name)


def test_output_files(tmp_path):
    tensors = run_output(tmp_path, "--random", 6)
    assert tensors["output"].shape == (6, 128) and tensors["output"].dtype == np.float32
    assert tensors["topk_ids"].shape == (6, 3) and tensors["topk_ids"].dtype == np.int32
    assert tensors["topk_weights"].shape == (6, 3) and tensors["topk_weights"].dtype == np.float32
    assert tensors["router_logits"].shape == (6, 8) and tensors["router_logits"].dtype == np.float32
    assert moekit("run", "--model", MODEL, "--random", 6, "--output", tmp_path / "out.npy").returncode == 0
    array = np.load(tmp_path / "out.npy")
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, tensors["output"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.npy", "out.safetensors"]


def test_seed_decides_random_tokens(tmp_path):
    first = run_output(tmp_path, "--random", 4)["output"]
    again = run_output(tmp_path, "--random", 4, "--seed", 0)["output"]
    other = run_output(tmp_path, "--random", 4, "--seed", 1)["output"]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    longer = run_output(tmp_path, "--random", 9)["output"]
    np.testing.assert_array_equal(longer[:4], first)


@pytest.mark.parametrize("ranks", [2, 3, 8, 11])
@pytest.mark.parametrize("tokens", [0, 1, 5, 16])
def test_ranks_never_change_bits(ranks, tokens, tmp_path):
    one = run_output(tmp_path, "--random", tokens)
    many = run_output(tmp_path, "--random", tokens, "--ranks", ranks, "--placement", "round_robin")
    for name in one:
        np.testing.assert_array_equal(one[name], many[name], err_msg=name)


def test_replicas_never_change_bits(tmp_path):
    placement = tmp_path / "replicas.json"
    placement.write_text(json.dumps({"experts_of_rank": [[7, 0, 1, 2], [3, 2, 7], [7, 4, 5, 6, 0]]}))
    one = run_output(tmp_path, "--random", 23)["output"]
    many = run_output(tmp_path, "--random", 23, "--ranks", 3, "--placement", placement)["output"]
    np.testing.assert_array_equal(one, many)


def test_run_json_tells_the_load():
    report = json_object("run", "--model", MODEL, "--random", 16, "--ranks", 2, "--repeat", 3)
    load = report["load"]
    assert len(load["per_expert"]) == 8 and len(load["per_rank"]) == 2
    assert sum(load["per_expert"]) == sum(load["per_rank"]) == 3 * 16 * 3
    assert load["per_rank"][0] == sum(load["per_expert"][:4])
    assert load["imbalance"] == pytest.approx(2 * max(load["per_rank"]) / sum(load["per_rank"]))
    assert load["calls"] == 3
    assert report["plan"]["placement_bytes"] == 0 and "rebalanced" not in report


@pytest.mark.parametrize("policy", ["greedy", "hierarchical"])
def test_rebalance_measures_moves_and_saves(policy, tmp_path):
    saved = tmp_path / "placement.json"
    flags = ["--random", 32, "--ranks", 4, "--nodes", 2, "--slots-per-rank", 3]
    one = run_output(tmp_path, "--random", 32)["output"]
    report = json_object("run", "--model", MODEL, *flags, "--rebalance", policy, "--save-placement", saved,
                         "--output", tmp_path / "moved.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "moved.npy"), one)
    assert report["rebalanced"]["policy"] == policy
    assert report["rebalanced"]["imbalance_before"] >= 1
    assert report["plan"]["placement_bytes"] > 0
    lists = json.loads(saved.read_text())["experts_of_rank"]
    assert len(lists) == 4 and all(len(own) <= 3 for own in lists)
    assert set(sum(lists, [])) == set(range(8))
    assert report["rebalanced"]["experts_packed"] + report["rebalanced"]["experts_kept"] == sum(map(len, lists))
    again = run_output(tmp_path, "--random", 32, "--ranks", 4, "--placement", saved)["output"]
    np.testing.assert_array_equal(again, one)
    resaved = tmp_path / "resaved.json"
    assert moekit("run", "--model", MODEL, "--ranks", 4, "--placement", saved, "--save-placement", resaved).returncode == 0
    assert resaved.read_text() == saved.read_text()


def test_rebalance_lowers_the_imbalance(tmp_path):
    ids = np.tile(np.array([[0, 1, 2]], dtype=np.int32), (24, 1))  # all of rank 0's experts
    weights = np.full((24, 3), 1 / 3, dtype=np.float32)
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "weights.npy", weights)
    report = json_object("run", "--model", MODEL, "--random", 24, "--ranks", 2, "--slots-per-rank", 6,
                         "--rebalance", "greedy", "--topk-ids", tmp_path / "ids.npy",
                         "--topk-weights", tmp_path / "weights.npy")
    assert report["rebalanced"]["imbalance_before"] == 2
    assert report["load"]["imbalance"] < 1.1


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_tensor_parallel_slices(tp, tmp_path):
    one = run_output(tmp_path, "--random", 11)
    sliced = run_output(tmp_path, "--random", 11, "--ranks", tp, "--tp", tp)
    assert row_errors(sliced["output"], one["output"]).max() < 1e-5
    for name in ["topk_ids", "topk_weights", "router_logits"]:
        np.testing.assert_array_equal(sliced[name], one[name])
    both = run_output(tmp_path, "--random", 11, "--ranks", 2 * tp, "--tp", tp, "--placement", "round_robin")
    np.testing.assert_array_equal(both["output"], sliced["output"])


def test_tensor_parallel_load_counts_tokens_once():
    report = json_object("run", "--model", MODEL, "--random", 10, "--ranks", 4, "--tp", 2)
    assert sum(report["load"]["per_expert"]) == 10 * 3
    assert len(report["load"]["per_rank"]) == 2


def test_more_ranks_than_anything(tmp_path):
    one = run_output(tmp_path, "--random", 5)["output"]
    many = run_output(tmp_path, "--random", 5, "--ranks", 64)["output"]
    np.testing.assert_array_equal(one, many)


def test_threads_never_change_bits(tmp_path):
    one = run_output(tmp_path, "--random", 33, "--threads", 1)["output"]
    three = run_output(tmp_path, "--random", 33, "--threads", 3)["output"]
    np.testing.assert_array_equal(one, three)


def test_rank_sums_stay_near(tmp_path):
    slots = run_output(tmp_path, "--random", 16)["output"]
    sums = run_output(tmp_path, "--random", 16, "--combine", "rank_sums", "--ranks", 4)["output"]
    again = run_output(tmp_path, "--random", 16, "--combine", "rank_sums", "--ranks", 4)["output"]
    assert row_errors(sums, slots).max() < 1e-5
    np.testing.assert_array_equal(sums, again)


def test_given_routing_skips_the_router(tmp_path):
    routed = run_output(tmp_path, "--random", 5)
    for ids in [routed["topk_ids"], routed["topk_ids"].astype(np.int64)]:
        np.save(tmp_path / "ids.npy", ids)
        np.save(tmp_path / "weights.npy", routed["topk_weights"])
        for ranks in [1, 2]:
            given = run_output(tmp_path, "--random", 5, "--topk-ids", tmp_path / "ids.npy", "--topk-weights",
                               tmp_path / "weights.npy", "--ranks", ranks, name="given.safetensors")
            np.testing.assert_array_equal(given["output"], routed["output"])
            np.testing.assert_array_equal(given["topk_ids"], routed["topk_ids"])


def test_minus_one_is_no_expert(tmp_path):
    np.save(tmp_path / "ids.npy", np.full((4, 3), -1, np.int32))
    np.save(tmp_path / "weights.npy", np.ones((4, 3), np.float32))
    given = run_output(tmp_path, "--random", 4, "--topk-ids", tmp_path / "ids.npy", "--topk-weights",
                       tmp_path / "weights.npy")
    assert (given["output"] == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_tokens_of_every_dtype(dtype, tmp_path):
    x = np.random.default_rng(3).standard_normal((4, 128)).astype(np.float16)
    np.save(tmp_path / "half.npy", x)
    np.save(tmp_path / "x.npy", x.astype(dtype))
    half = run_output(tmp_path, "--tokens", tmp_path / "half.npy", "--activations", "f32")["output"]
    other = run_output(tmp_path, "--tokens", tmp_path / "x.npy", "--activations", "f32")["output"]
    np.testing.assert_array_equal(half, other)


def test_capacity_drop_counts():
    report = json_object("run", "--model", MODEL, "--random", 64, "--capacity", "drop:8")
    assert report["dropped"] > 0
    report = json_object("run", "--model", MODEL, "--random", 64, "--capacity", "drop:100000")
    assert report["dropped"] == 0


def test_check_lines():
    lines = json_lines("check", "--model", MODEL, "--random", 4)
    assert {line["backend"] for line in lines} >= {"cpu", "ref"}
    for line in lines:
        assert set(line) >= {"backend", "supported", "reasons", "max_abs", "rel_rms", "worst_row_rms", "bound",
                             "passed"}
        assert line["supported"] or line["reasons"]


def test_check_of_one_back_end():
    lines = json_lines("check", "--model", MODEL, "--random", 4, "--backend", "ref")
    assert [line["backend"] for line in lines] == ["ref"]
    assert lines[0]["worst_row_rms"] == 0


def test_explain_of_a_model_and_of_a_problem():
    for subject in [["--model", MODEL], ["--problem", "qwen3-30b-a3b:weights=fp8_block,tokens=64"]]:
        report = json_object("explain", *subject, "--ranks", 2)
        assert set(report) >= {"problem", "candidates", "chosen", "plan"}
        assert {"mega", "prepare", "experts"} >= {c["kind"] for c in report["candidates"]} >= {"prepare", "experts"}
        for candidate in report["candidates"]:
            assert set(candidate) >= {"name", "kind", "supported", "reasons"}
            assert candidate["supported"] != bool(candidate["reasons"])
        assert set(report["chosen"]) >= {"backend", "prepare"}
        assert set(report["plan"]) >= {"weights_bytes", "workspace_bytes", "wire_bytes", "reduce_duty", "quant_duty",
                                       "buckets"}
        for bucket in report["plan"]["buckets"]:
            assert set(bucket) >= {"max_tokens", "backend", "knobs"}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("fixture", ["qwen3moe-bf16-sharded", "qwen2moe-bf16", "deepseekv3-ct-nvfp4",
                                     "nemotronh-latent-f32", "gptoss-mxfp4"])
def test_explain_and_run_state_the_same_bytes(fixture, ranks):
    model = FIXTURES / fixture
    planned = json_object("explain", "--model", model, "--max-tokens", -(-16 // ranks), "--ranks", ranks)["plan"]
    done = json_object("run", "--model", model, "--random", 16, "--ranks", ranks)["plan"]
    for key in ["weights_bytes", "workspace_bytes", "wire_bytes"]:
        assert planned[key] == done[key], key


def test_explain_answers_for_every_pair():
    report = json_object("explain", "--problem", SMALL, "--ranks", 3)
    names = {kind: [c["name"] for c in report["candidates"] if c["kind"] == kind] for kind in ["prepare", "experts"]}
    pairs = {(p["prepare"], p["experts"]): p for p in report["pairs"]}
    assert list(pairs) == [(p, e) for e in names["experts"] for p in names["prepare"]]
    assert len(pairs) == len(report["pairs"])
    for pair in pairs.values():
        assert pair["supported"] != bool(pair["reasons"])
        assert bool(pair["note"]) == (pair["supported"] and not pair["chosen"])
    assert [p for p, answer in pairs.items() if answer["chosen"]] == [
        (report["chosen"]["prepare"], report["chosen"]["backend"])]
    assert "serves one rank" in " ".join(pairs["local", "cpu"]["reasons"])
    assert "rows" in " ".join(pairs["all2all", "cpu_batched"]["reasons"])
    assert pairs["all2all", "ref"]["supported"]
    # An answer does not depend on what was asked for by name, the choice does.
    other = json_object("explain", "--problem", SMALL, "--ranks", 3, "--backend", "ref")
    for now, before in zip(other["pairs"], report["pairs"], strict=True):
        assert now["supported"] == before["supported"] and now["reasons"] == before["reasons"]
    assert next(p for p in other["pairs"] if p["chosen"])["experts"] == "ref"
    compact = moekit("explain", "--problem", SMALL, "--ranks", 3).stdout
    assert "chosen" in compact and "serves one rank" in compact
    verbose = moekit("explain", "--problem", SMALL, "--ranks", 3, "--verbose").stdout
    assert len(verbose.splitlines()) > len(compact.splitlines())


def test_the_hash_of_a_plan_is_that_of_its_ranks_agreement():
    def hash_of(*flags):
        return json_object("run", "--model", MODEL, "--layer", 1, "--random", 6, "--ranks", 2, *flags)["plan"]["hash"]

    base = hash_of()
    assert re.fullmatch(r"[0-9a-f]{16}", base)
    assert hash_of("--threads", 1) == base  # a rank's own affair
    assert hash_of("--combine", "rank_sums") != base


def test_explain_honours_a_name():
    report = json_object("explain", "--problem", SMALL, "--backend", "ref")
    assert report["chosen"]["backend"] == "ref"


def test_explain_needs_no_memory_for_weights():
    # 61 billion parameters of one layer: planned in a process that may hold 2 GiB.
    done = moekit("explain", "--problem", "E=384,k=8,H=7168,I=7168,act=silu,weights=bf16", "--json",
                  preexec_fn=limit_memory)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["workspace_bytes"] > 0


def limit_memory():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def test_every_listed_problem_can_be_explained():
    problems = json_object("explain", "--list-problems")["problems"]
    names = [p["name"] for p in problems]
    assert {"qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "nemotron-3-nano",
            "kimi-k2"} <= set(names)
    for problem in problems:
        by_name = json_object("explain", "--problem", problem["name"])
        by_value = json_object("explain", "--problem", problem["problem"])
        assert by_name["plan"] == by_value["plan"]
        assert "weights=" in by_name["problem"]


def test_bench_lines():
    lines = json_lines("bench", "--problem", SMALL, "--tokens-list", "1,5", "--min-time", "0.01", "--ranks", 2)
    machine, points = lines[0], lines[1:]
    assert set(machine) >= {"version", "cpu", "memory", "probe", "gpus", "missing"}
    assert [p["tokens"] for p in points] == [1, 5] and [p["tokens_total"] for p in points] == [2, 10]
    for point in points:
        assert set(point) >= {"problem", "device", "backend", "tokens", "ranks", "routing", "time_us", "flops", "bytes",
                              "tflops", "gbs", "floor_us", "floor_fraction", "probe", "peers"}
        assert set(point["bytes"]) >= {"weights", "activations", "wire"}
        assert set(point["time_us"]) >= {"median", "p5", "p95", "repeat"}
        assert point["time_us"]["p5"] <= point["time_us"]["median"] <= point["time_us"]["p95"]
        assert point["flops"] == point["tokens_total"] * 2 * 3 * 2 * 64 * 32
        total = sum(point["bytes"].values())
        floor = max(total / point["probe"]["bandwidth_gbs"] / 1e3, point["flops"] / point["probe"]["matrix_tflops"] / 1e6)
        assert point["floor_us"] == pytest.approx(floor)
        assert point["floor_fraction"] == pytest.approx(floor / point["time_us"]["median"])
        assert "weights=bf16" in point["problem"]
        back = json_object("explain", "--problem", point["problem"])
        assert back["problem"] == point["problem"]


def test_combos_of_a_placement_from_a_file(tmp_path):
    file = tmp_path / "placement.json"
    file.write_text('{"experts_of_rank": [[0, 1, 2, 4], [0, 1, 3], [4, 5], [6, 7]]}')
    args = ["--problem", "E=8,k=2,H=64,I=32,weights=bf16,tokens=5", "--ranks", 4, "--experts", "cpu"]
    lines = json_lines("combos", *args, "--placement", file)
    assert {x["verdict"] for x in lines if x["prepare"] in {"all2all", "push", "hierarchical"}} == {"passed"}
    assert all("placement=" in x["problem"] for x in lines if x["verdict"] == "passed")


def test_bench_of_the_exchange():
    args = ["--problem", SMALL, "--tokens-list", "7", "--min-time", "0.01", "--ranks", 2, "--prepare",
            "all2all"]
    whole = json_lines("bench", *args)[1]
    alone = json_lines("bench", *args, "--exchange-only")[1]
    for point in [whole, alone]:
        exchange = point["exchange"]
        assert set(exchange) >= {"bytes", "time_us", "floor_us", "floor_fraction", "memcpy_gbs", "overhead_us"}
        # Slot rows of f32 come back; every one of 14 tokens goes out once to each rank that serves it.
        back = 14 * 2 * 64 * 4
        assert 0 < exchange["bytes"] < exchange["bytes"] + exchange["own_bytes"]
        assert back < exchange["bytes"] + exchange["own_bytes"] <= back + 14 * 2 * (64 * 4 + 64)
        assert exchange["floor_us"] == pytest.approx(exchange["bytes"] / exchange["memcpy_gbs"] / 1e3)
        assert exchange["floor_fraction"] == pytest.approx(exchange["floor_us"] / exchange["time_us"])
        assert exchange["overhead_us"] == pytest.approx(exchange["time_us"] - exchange["local_us"])
        assert exchange["p5_us"] <= exchange["time_us"] <= exchange["p95_us"]
    assert whole["exchange"]["bytes"] == alone["exchange"]["bytes"]
    assert alone["time_us"]["median"] == alone["exchange"]["time_us"] and alone["flops"] == 0
    assert alone["bytes"] == {"weights": 0, "activations": 0, "wire": alone["exchange"]["bytes"]}
    assert "packing" in whole and "packing" not in alone
    assert "exchange" not in json_lines("bench", "--problem", SMALL, "--tokens-list", "1", "--min-time", "0.01")[1]
    human = moekit("bench", *args, "--exchange-only")
    assert human.returncode == 0 and "memcpy GB/s" in human.stdout
    done = moekit("bench", "--problem", SMALL, "--exchange-only")
    assert done.returncode == 2 and "2 ranks or more" in done.stderr


def test_bench_of_packing():
    point = json_lines("bench", "--problem", "E=8,k=2,H=512,I=256,weights=bf16", "--tokens-list", "1", "--min-time",
                       "0.01")[1]
    packing = point["packing"]
    assert packing["bytes"] >= 8 * 3 * 512 * 256 * 2
    assert packing["gbs"] == pytest.approx(packing["bytes"] / packing["seconds"] / 1e9)
    assert packing["memcpy_fraction"] == pytest.approx(packing["gbs"] / packing["memcpy_gbs"])
    assert packing["fault_us_per_mib"] > 0
    assert "packing" in moekit("bench", "--problem", SMALL, "--tokens-list", "1", "--min-time", "0.01").stdout


@pytest.mark.parametrize("routing", ["uniform", "zipf:1.0", "hot", "one_rank", "holes"])
def test_bench_routings(routing):
    lines = json_lines("bench", "--problem", SMALL, "--tokens-list", "16", "--min-time", "0.01", "--ranks", 2,
                       "--routing", routing)
    assert lines[1]["routing"] == routing
    if routing == "one_rank":
        assert lines[1]["active_experts"] == 4


def test_bench_of_given_ids(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([[0, 3], [3, 7]], np.int32))
    lines = json_lines("bench", "--problem", SMALL, "--tokens-list", "3", "--min-time", "0.01", "--routing",
                       tmp_path / "ids.npy")
    assert lines[1]["active_experts"] == 3


def test_bench_of_a_model_with_router_and_shared_experts():
    model = FIXTURES / "qwen2moe-bf16"
    bare = json_lines("bench", "--model", model, "--tokens-list", "4", "--min-time", "0.01")[1]
    whole = json_lines("bench", "--model", model, "--tokens-list", "4", "--min-time", "0.01", "--include",
                       "router,shared")[1]
    assert whole["flops"] > bare["flops"] and whole["routing"] == "router"


def test_doctor():
    report = json_object("doctor")
    assert report["cpu"]["cpus_usable"] >= 1 and report["cpu"]["model"]
    usable = [level["name"] for level in report["cpu"]["isa_levels"] if level["usable"]]
    assert report["cpu"]["isa"] in usable
    assert report["memory"]["total_bytes"] > 0
    assert report["probe"]["bandwidth_gbs"] > 0 and report["probe"]["matrix_tflops"] > 0
    assert {c["name"] for c in report["components"]} >= {"cuda driver", "cuda toolkit", "cuda plug-in", "nccl", "mpi", "mpi plug-in"}
    for part in report["missing"]:
        assert part["what"] and part["effect"]
    assert "level in use" in moekit("doctor").stdout


def fake_nvcc(folder, version):
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 1.2, V{version}'\n")
    path.chmod(0o755)
    return path


def toolkit(environment):
    report = json.loads(moekit("doctor", "--json", "--threads", 1, env={"PATH": "/usr/bin:/bin", **environment}).stdout)
    return next(c for c in report["components"] if c["name"] == "cuda toolkit")


def test_doctor_finds_a_toolkit_off_the_path(tmp_path):
    first = fake_nvcc(tmp_path / "it's a folder", "97.3.5")
    second = fake_nvcc(tmp_path / "second", "98.1.0")
    for environment, path, version in [({"CUDA_HOME": str(first.parents[1])}, first, "97.3.5"),
                                       ({"CUDA_PATH": str(second.parents[1])}, second, "98.1.0"),
                                       ({"CUDACXX": str(second)}, second, "98.1.0"),
                                       ({"PATH": f"{second.parent}:/usr/bin:/bin"}, second, "98.1.0")]:
        part = toolkit(environment)
        assert (part["found"], part["version"], part["detail"]) == (True, version, str(path))


def test_doctor_does_not_take_a_broken_compiler_for_a_toolkit(tmp_path):
    broken = fake_nvcc(tmp_path / "broken", "")
    broken.write_text("#!/bin/sh\nexit 1\n")
    part = toolkit({"CUDA_HOME": str(tmp_path / "broken")})
    assert not part["found"] and str(broken) in part["detail"]


def test_bench_report(tmp_path):
    report = tmp_path / "report.html"
    lines = json_lines("bench", "--problem", SMALL, "--tokens-list", "1,5", "--min-time", "0.01", "--html", report)
    page = report.read_text()
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert page.count("<svg") == 2 and page.count("<svg") == page.count("</svg>")
    assert "nan" not in page.split("<details>")[0].lower()
    for point in lines[1:]:
        assert point["problem"].split("tokens=")[0] in page
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    ET.fromstring(re.search(r"<svg.*?</svg>", page, re.S).group())


def test_bench_report_path_is_checked_first(tmp_path):
    done = moekit("bench", "--problem", SMALL, "--html", tmp_path / "no" / "report.html")
    assert done.returncode == 2 and "--html" in done.stderr and done.stdout == ""


def test_pack_cache(tmp_path):
    flags = ["run", "--model", MODEL, "--random", 3, "--pack-cache", tmp_path / "packed"]
    first, second = json_lines(*flags)[0], json_lines(*flags)[0]
    assert first["plan"]["pack_cache"] == "stored" and second["plan"]["pack_cache"] == "hit"
    assert first["output"] == second["output"]
    plain = json_lines("run", "--model", MODEL, "--random", 3)[0]
    assert plain["plan"]["pack_cache"] == "off" and plain["output"] == first["output"]
    (tmp_path / "file").write_text("")
    assert moekit("run", "--model", MODEL, "--pack-cache", tmp_path / "file").returncode == 2
