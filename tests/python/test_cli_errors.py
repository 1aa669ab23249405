"""Exit codes and the one line on stderr, for what can be wrong on a command line or in a file."""

import json
import os
import re
import shutil
import struct

import numpy as np
import pytest

from moekit_program import FIXTURES, moekit
from tensor_files import write_safetensors

MODEL = FIXTURES / "qwen3moe-bf16-sharded"
DENSE_FIRST = FIXTURES / "deepseekv3-bf16"
KINDS = {2: "invalid_argument", 3: "unsupported", 4: "corrupt_file"}

USAGE = {
    "no verb": [],
    "unknown verb": ["dance"],
    "unknown flag": ["run", "--model", MODEL, "--dance"],
    "no model": ["run"],
    "bad number": ["run", "--model", MODEL, "--random", "many"],
    "negative tokens": ["run", "--model", MODEL, "--random", "-1"],
    "no such directory": ["inspect", "/nowhere/at/all"],
    "a file as directory": ["inspect", MODEL / "config.json"],
    "run without directory": ["run", "--model", "/nowhere/at/all"],
    "layer beyond the model": ["run", "--model", MODEL, "--layer", "99"],
    "negative layer": ["run", "--model", MODEL, "--layer", "-1"],
    "dense layer": ["run", "--model", DENSE_FIRST, "--layer", "0"],
    "no ranks": ["run", "--model", MODEL, "--ranks", "0"],
    "too many ranks": ["run", "--model", MODEL, "--ranks", "1025"],
    "more nodes than ranks": ["run", "--model", MODEL, "--ranks", "2", "--nodes", "3"],
    "no nodes": ["run", "--model", MODEL, "--ranks", "2", "--nodes", "0"],
    "token ids for a layer of logits": ["run", "--model", MODEL, "--token-ids", "x.npy"],
    "token ids for layers of logits": ["check", "--model", MODEL, "--all-layers", "--token-ids", "x.npy"],
    "unknown activations": ["run", "--model", MODEL, "--activations", "fp3"],
    "unknown transport": ["run", "--model", MODEL, "--transport", "pigeon"],
    "unknown back-end": ["run", "--model", MODEL, "--backend", "nonsense"],
    "unknown back-end in check": ["check", "--model", MODEL, "--backend", "nonsense"],
    "unknown back-end in explain": ["explain", "--model", MODEL, "--backend", "nonsense", "--json"],
    "unknown prepare": ["run", "--model", MODEL, "--prepare", "nonsense"],
    "unknown device": ["run", "--model", MODEL, "--device", "abacus"],
    "unknown combine": ["run", "--model", MODEL, "--combine", "somehow"],
    "unknown combine dtype": ["run", "--model", MODEL, "--combine-dtype", "f16"],
    "unknown wire": ["run", "--model", MODEL, "--wire", "copper"],
    "bad capacity": ["run", "--model", MODEL, "--capacity", "drop"],
    "zero capacity": ["run", "--model", MODEL, "--capacity", "refuse:0"],
    "bad deadline": ["run", "--model", MODEL, "--deadline", "soon"],
    "zero deadline": ["run", "--model", MODEL, "--deadline", "0s"],
    "missing placement": ["run", "--model", MODEL, "--ranks", "2", "--placement", "/nowhere.json"],
    "no slices": ["run", "--model", MODEL, "--tp", "0"],
    "ranks that slices do not divide": ["run", "--model", MODEL, "--ranks", "4", "--tp", "3"],
    "negative slots": ["run", "--model", MODEL, "--slots-per-rank", "-1"],
    "too few slots": ["run", "--model", MODEL, "--ranks", "2", "--slots-per-rank", "3"],
    "rebalance without slots": ["run", "--model", MODEL, "--ranks", "2", "--rebalance", "greedy"],
    "unknown rebalance": ["run", "--model", MODEL, "--slots-per-rank", "8", "--rebalance", "fairly"],
    "placement saved nowhere": ["run", "--model", MODEL, "--save-placement", "/nowhere/p.json"],
    "tokens and random": ["run", "--model", MODEL, "--random", "3", "--tokens", "x.npy"],
    "no tokens file": ["run", "--model", MODEL, "--tokens", "/nowhere.npy"],
    "ids without weights": ["run", "--model", MODEL, "--topk-ids", "x.npy"],
    "output nowhere": ["run", "--model", MODEL, "--output", "/nowhere/out.npy"],
    "output of unknown kind": ["run", "--model", MODEL, "--output", "out.txt"],
    "repeat zero": ["run", "--model", MODEL, "--repeat", "0"],
    "log nowhere": ["inspect", MODEL, "--log", "/nowhere/log.txt"],
    "explain nothing": ["explain"],
    "explain two things": ["explain", "--model", MODEL, "--problem", "mixtral-8x7b"],
    "unknown problem": ["explain", "--problem", "mixtral-9x9b"],
    "unknown problem key": ["explain", "--problem", "mixtral-8x7b:colour=red"],
    "more experts a token than experts": ["explain", "--problem", "E=4,k=5,H=64,I=64,act=silu,weights=bf16"],
    "bad token list": ["bench", "--problem", "mixtral-8x7b", "--tokens-list", "1,x"],
    "bad routing": ["bench", "--problem", "E=4,k=2,H=64,I=64,act=silu,weights=bf16", "--routing", "zipf:x"],
    "bad include": ["bench", "--problem", "mixtral-8x7b", "--include", "dessert"],
    "all layers and one": ["check", "--model", MODEL, "--layer", "0", "--all-layers"],
}


def expect(code, *args):
    done = moekit(*args)
    assert done.returncode == code, f"{done.returncode}: {done.stderr}{done.stdout}"
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"moekit: {KINDS[code]}: "), lines[0]
    assert len(lines[0]) > len(f"moekit: {KINDS[code]}: ") + 10
    return lines[0]


@pytest.mark.parametrize("name", USAGE)
def test_wrong_command_lines_are_2(name):
    expect(2, *USAGE[name])


UNSUPPORTED = {
    "slices under scales of whole rows": ["run", "--model", MODEL, "--ranks", "2", "--tp", "2", "--activations", "fp8_token"],
    "more slices than columns": ["run", "--model", MODEL, "--ranks", "64", "--tp", "64"],
    "a GPU": ["run", "--model", MODEL, "--device", "cuda"],
    "a GPU that is not here": ["explain", "--model", MODEL, "--device", "cuda", "--arch", "75"],
    "NCCL ranks": ["run", "--model", MODEL, "--transport", "nccl"],
    "peer ranks": ["run", "--model", MODEL, "--transport", "p2p"],
    "static activations without scales": ["run", "--model", MODEL, "--activations", "fp8_tensor"],
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_nothing_covers_is_3(name):
    expect(3, *UNSUPPORTED[name])


EMPTY = {
    "--model": ["run", "--model", ""],
    "DIR": ["inspect", ""],
    "--output": ["run", "--model", MODEL, "--output", ""],
    "--save-placement": ["run", "--model", MODEL, "--save-placement", ""],
    "--tokens": ["run", "--model", MODEL, "--tokens", ""],
    "--token-ids": ["run", "--model", MODEL, "--token-ids", ""],
    "--placement": ["run", "--model", MODEL, "--placement", ""],
    "--pack-cache": ["run", "--model", MODEL, "--pack-cache", ""],
    "--backend": ["run", "--model", MODEL, "--backend", ""],
    "--log": ["inspect", MODEL, "--log", ""],
    "--trace": ["profile", "--model", MODEL, "--trace", ""],
    "--golden": ["check", "--model", MODEL, "--random", "3", "--golden", ""],
    "--html": ["bench", "--problem", "mixtral-8x7b", "--html", ""],
    "--out": ["quantize", "--model", MODEL, "--scheme", "nvfp4", "--out", ""],
}


@pytest.mark.parametrize("flag", EMPTY)
def test_an_empty_value_is_no_value(flag):
    line = expect(2, *EMPTY[flag])
    assert flag in line and "empty" in line


@pytest.mark.parametrize("flag", ["--output", "--save-placement"])
def test_places_to_write_are_checked_before_the_run(flag, tmp_path):
    other, name = ("--save-placement", "p.json") if flag == "--output" else ("--output", "out.npy")
    line = expect(2, "run", "--model", MODEL, other, tmp_path / name, flag, "/nowhere/at/all.npy")
    assert flag in line and list(tmp_path.iterdir()) == []


def test_nodes_and_token_ids_say_what_they_are_for():
    assert "--nodes" in expect(2, *USAGE["no nodes"])
    for name in ["token ids for a layer of logits", "token ids for layers of logits"]:
        line = expect(2, *USAGE[name])
        assert "--token-ids" in line and "routes by token id" in line


def test_a_golden_without_its_rows_asks_for_them(tmp_path):
    np.save(tmp_path / "golden.npy", tokens())
    line = expect(2, "check", "--model", MODEL, "--golden", tmp_path / "golden.npy")
    assert "--golden" in line and "--tokens" in line
    np.save(tmp_path / "x.npy", tokens(rows=4))
    line = expect(2, "check", "--model", MODEL, "--tokens", tmp_path / "x.npy", "--golden", tmp_path / "golden.npy")
    assert "[4, 128]" in line and "--tokens" in line


def test_a_reason_is_said_once_a_member():
    for args in REPEATED.values():
        explained = json.loads(moekit("explain", *args, "--json").stdout)
        lists = [c["reasons"] for c in explained["candidates"]] + [p["reasons"] for p in explained["pairs"]]
        assert any(lists)
        for reasons in lists:
            assert len(reasons) == len(set(reasons)), reasons


REPEATED = {
    "a GPU for members of the CPU": ["--model", MODEL, "--device", "cuda", "--arch", "90a"],
    "rank sums": ["--model", MODEL, "--ranks", "2", "--combine", "rank_sums"],
    "static scales by expert": ["--model", FIXTURES / "mixtral-modelopt-fp8", "--ranks", "2"],
    "weight on input": ["--model", FIXTURES / "llama4-modelopt-fp8", "--ranks", "2"],
}


def test_members_that_refuse_alike_share_their_reason():
    line = expect(3, "run", "--model", MODEL, "--device", "cuda")
    reason = "runs on the CPU, the plan asks for CUDA device 0"
    assert 1 <= line.count(reason) <= 3, line  # of prepare, of experts


def test_a_rank_is_named_once():
    line = expect(2, "run", "--model", MODEL, "--random", 64, "--ranks", 2, "--capacity", "refuse:1")
    assert "rank 0 would get" in line and not re.search(r"(rank \d+)\b.? \1\b", line), line


def test_refusals_say_which_part(tmp_path):
    assert "nccl" in expect(3, *UNSUPPORTED["NCCL ranks"])
    assert "CUDA" in expect(3, *UNSUPPORTED["a GPU"])


def test_explain_prints_reasons_before_it_fails():
    done = moekit("explain", "--model", MODEL, "--ranks", "2", "--prepare", "local", "--json")
    assert done.returncode == 3
    explained = json.loads(done.stdout)
    assert explained["chosen"] is None
    local = [c for c in explained["candidates"] if c["name"] == "local"]
    assert local and not local[0]["supported"] and local[0]["reasons"]


@pytest.fixture
def model_copy(tmp_path):
    target = tmp_path / "model"
    shutil.copytree(MODEL, target)
    return target


def edit_config(model, **changes):
    path = model / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def test_missing_config_is_4(model_copy):
    (model_copy / "config.json").unlink()
    assert "config.json" in expect(4, "inspect", model_copy)
    expect(4, "run", "--model", model_copy)


def test_lfs_pointer_is_4(model_copy):
    for shard in model_copy.glob("model-*.safetensors"):
        shard.unlink()
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in expect(4, "run", "--model", model_copy)


def test_unknown_verbs_are_told_the_known_ones():
    line = expect(2, "chek", "--model", MODEL)
    assert '"chek"' in line and "check" in line and "inspect" in line


def test_golden_verdict_names_the_row_that_is_not_finite(tmp_path):
    moekit("run", "--model", MODEL, "--random", 5, "--output", tmp_path / "out.npy")
    golden = np.load(tmp_path / "out.npy")
    golden[3, 7] = np.nan
    np.save(tmp_path / "golden.npy", golden)
    done = moekit("check", "--model", MODEL, "--random", 5, "--golden", tmp_path / "golden.npy")
    assert done.returncode == 1 and "golden bound" in done.stdout
    assert "FAILED against the golden: 1 values are finite in one of the two only, the first in row 3" in done.stdout


def test_malformed_config_is_4(model_copy):
    (model_copy / "config.json").write_text('{"model_type": ')
    expect(4, "inspect", model_copy)


def test_missing_shard_is_4(model_copy):
    shard = sorted(model_copy.glob("model-*.safetensors"))[2]
    shard.unlink()
    assert shard.name in expect(4, "run", "--model", model_copy)


def test_truncated_shard_is_4(model_copy):
    shard = sorted(model_copy.glob("model-*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-7])
    expect(4, "run", "--model", model_copy)


def test_more_experts_a_token_than_experts_is_4(model_copy):
    edit_config(model_copy, num_experts_per_tok=9)
    line = expect(4, "run", "--model", model_copy)
    assert "num_experts_per_tok" in line and "at most 8" in line and "came 9" in line and "correct it" in line


def test_unknown_family_is_3(model_copy):
    edit_config(model_copy, model_type="mystery_moe", architectures=["MysteryForCausalLM"])
    assert "mystery_moe" in expect(3, "inspect", model_copy)


def tokens(rows=3, width=128, dtype=np.float32):
    return np.random.default_rng(7).standard_normal((rows, width)).astype(dtype)


BAD_TOKENS = {
    "wrong width": tokens(width=127),
    "one axis": tokens().reshape(-1),
    "three axes": tokens().reshape(1, 3, 128),
    "integers": np.ones((3, 128), dtype=np.int32),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_well_formed_tokens_that_do_not_fit_are_2(name, tmp_path):
    np.save(tmp_path / "x.npy", BAD_TOKENS[name])
    expect(2, "run", "--model", MODEL, "--tokens", tmp_path / "x.npy")
    write_safetensors(tmp_path / "x.safetensors", {"x": BAD_TOKENS[name]})
    expect(2, "run", "--model", MODEL, "--tokens", f"{tmp_path / 'x.safetensors'}:x")


def test_malformed_tensor_files_are_4(tmp_path):
    np.save(tmp_path / "x.npy", tokens())
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "short.npy").write_bytes(whole[:-5])
    (tmp_path / "noise.npy").write_bytes(b"not a tensor file at all, but long enough")
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    for name in ["short.npy", "noise.npy", "empty.npy", "huge.safetensors"]:
        expect(4, "run", "--model", MODEL, "--tokens", tmp_path / name)


def test_a_file_of_several_tensors_needs_a_name(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": tokens(), "b": tokens()})
    expect(2, "run", "--model", MODEL, "--tokens", path)
    expect(2, "run", "--model", MODEL, "--tokens", f"{path}:c")
    assert moekit("run", "--model", MODEL, "--tokens", f"{path}:a").returncode == 0


def test_a_colon_in_a_file_name_is_no_name(tmp_path):
    path = tmp_path / "x:y.npy"
    np.save(path, tokens())
    assert moekit("run", "--model", MODEL, "--tokens", path).returncode == 0


def routing(ids, weights=None):
    ids = np.asarray(ids)
    return ids, np.full(ids.shape, 0.5, np.float32) if weights is None else weights


BAD_ROUTING = {
    "id beyond the experts": routing(np.array([[0, 1, 2], [3, 4, 8], [0, 1, 2]], np.int32)),
    "id below -1": routing(np.array([[0, 1, 2], [3, 4, -2], [0, 1, 2]], np.int64)),
    "too few slots": routing(np.zeros((3, 2), np.int32)),
    "too few rows": routing(np.zeros((2, 3), np.int32)),
    "ids as floats": routing(np.zeros((3, 3), np.float32)),
    "weights of another shape": routing(np.zeros((3, 3), np.int32), np.zeros((3, 2), np.float32)),
    "weights as integers": routing(np.zeros((3, 3), np.int32), np.zeros((3, 3), np.int32)),
}


def test_slots_of_another_shape_are_told_their_own(tmp_path):
    ids, weights = BAD_ROUTING["too few slots"]
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "weights.npy", weights)
    line = expect(2, "run", "--model", MODEL, "--random", 3, "--topk-ids", tmp_path / "ids.npy", "--topk-weights",
                  tmp_path / "weights.npy")
    assert "[3, 3]" in line and "experts a token" in line and "width" not in line


@pytest.mark.parametrize("name", BAD_ROUTING)
def test_routing_that_does_not_fit_is_2(name, tmp_path):
    ids, weights = BAD_ROUTING[name]
    np.save(tmp_path / "x.npy", tokens())
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "weights.npy", weights)
    expect(2, "run", "--model", MODEL, "--tokens", tmp_path / "x.npy", "--topk-ids", tmp_path / "ids.npy",
           "--topk-weights", tmp_path / "weights.npy")


def test_a_wrong_id_is_named_with_its_place(tmp_path):
    ids, weights = BAD_ROUTING["id beyond the experts"]
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "weights.npy", weights)
    for ranks in [1, 3]:
        line = expect(2, "run", "--model", MODEL, "--random", 3, "--topk-ids", tmp_path / "ids.npy",
                      "--topk-weights", tmp_path / "weights.npy", "--ranks", ranks)
        assert "row 1" in line and "slot 2" in line and "8" in line


def test_failing_runs_leave_no_file(tmp_path):
    np.save(tmp_path / "x.npy", BAD_TOKENS["wrong width"])
    before = sorted(p.name for p in tmp_path.iterdir())
    expect(2, "run", "--model", MODEL, "--tokens", tmp_path / "x.npy", "--output", tmp_path / "out.safetensors")
    expect(2, "run", "--model", MODEL, "--backend", "nonsense", "--output", tmp_path / "out.npy")
    expect(3, "run", "--model", MODEL, "--device", "cuda", "--output", tmp_path / "out.npy")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_output_may_not_be_a_directory(tmp_path):
    (tmp_path / "out.npy").mkdir()
    expect(2, "run", "--model", MODEL, "--output", tmp_path / "out.npy")
    assert list((tmp_path / "out.npy").iterdir()) == []


def test_capacity_refuse_fails_and_names_the_rows():
    line = expect(2, "run", "--model", MODEL, "--random", 64, "--capacity", "refuse:1")
    assert "capacity" in line


def replaced(path, make):
    path.unlink()
    make(path)


NO_PLAIN_FILE = {
    "a directory": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "an empty file": lambda path: path.write_bytes(b""),
    "a dangling link": lambda path: path.symlink_to("/nowhere/at/all"),
    "a link to itself": lambda path: path.symlink_to(path),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", NO_PLAIN_FILE)
@pytest.mark.parametrize("which", ["config.json", "model.safetensors.index.json", "shard"])
def test_what_is_no_plain_file_is_4(model_copy, which, kind):
    path = sorted(model_copy.glob("model-*.safetensors"))[1] if which == "shard" else model_copy / which
    replaced(path, NO_PLAIN_FILE[kind])
    assert path.name in expect(4, "run", "--model", model_copy)
    expect(4, "inspect", model_copy)


@pytest.mark.parametrize("kind", NO_PLAIN_FILE)
def test_tokens_that_are_no_plain_file(tmp_path, kind):
    path = tmp_path / "x.npy"
    NO_PLAIN_FILE[kind](path)
    done = moekit("run", "--model", MODEL, "--tokens", path, "--output", tmp_path / "out.npy")
    assert done.returncode in (2, 4) and len(done.stderr.splitlines()) == 1 and "x.npy" in done.stderr
    assert not (tmp_path / "out.npy").exists()


ABSURD = {
    "no experts": {"num_experts": 0},
    "10^18 experts": {"num_experts": 10**18},
    "more experts than are stored": {"num_experts": 9},
    "fewer experts than are stored": {"num_experts": 7},
    "experts as text": {"num_experts": "8"},
    "no experts a token": {"num_experts_per_tok": 0},
    "10^18 experts a token": {"num_experts_per_tok": 10**18},
    "more experts a token than there are": {"num_experts_per_tok": 99},
    "10^18 wide": {"hidden_size": 10**18},
    "another width": {"hidden_size": 64},
    "10^18 inner": {"moe_intermediate_size": 10**18},
    "10^18 layers": {"num_hidden_layers": 10**18},
    "negative layers": {"num_hidden_layers": -2},
    "not a number": {"hidden_size": float("nan")},
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_configs_are_4_without_taking_memory(model_copy, name):
    edit_config(model_copy, **ABSURD[name])
    done = moekit("run", "--model", model_copy, preexec_fn=limit_memory)
    assert done.returncode == 4, f"{done.returncode}: {done.stderr}"
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("moekit: corrupt_file: ")


def limit_memory():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


def rewrite_header(path, edit):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = edit(data[8 : 8 + length].decode())
    text = text.encode() if isinstance(text, str) else text
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit_entry(**changes):
    def edit(text):
        header = json.loads(text)
        name = next(n for n in header if ".experts." in n)
        header[name].update(changes)
        return json.dumps(header)

    return edit


def same_bytes_twice(text):
    header = json.loads(text)
    first, second = [n for n in header if ".experts." in n][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    return json.dumps(header)


def key_twice(text):
    name = next(n for n in json.loads(text) if ".experts." in n)
    return text.rstrip()[:-1] + f", {json.dumps(name)}: {json.dumps(json.loads(text)[name])}}}"


BAD_HEADERS = {
    "overlapping tensors": same_bytes_twice,
    "the same key twice": key_twice,
    "an end before its begin": edit_entry(data_offsets=[100, 0]),
    "a negative offset": edit_entry(data_offsets=[-8, 0]),
    "an offset beyond 64 bits": edit_entry(data_offsets=[0, 10**30]),
    "an offset beyond the file": edit_entry(data_offsets=[0, 10**18]),
    "a shape of 10^36": edit_entry(shape=[10**18, 10**18]),
    "a negative dimension": edit_entry(shape=[-1, 128]),
    "an unknown dtype": edit_entry(dtype="BF17"),
    "another dtype": edit_entry(dtype="F32"),
    "no JSON": lambda text: "hello",
    "no object": lambda text: "[]",
    "no tensors": lambda text: "{}",
    "endless nesting": lambda text: '{"a":' * 10000,
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers_are_4(model_copy, name):
    shard = next(s for s in sorted(model_copy.glob("model-*.safetensors")) if b".experts." in s.read_bytes())
    rewrite_header(shard, BAD_HEADERS[name])
    expect(4, "run", "--model", model_copy)


NO_UTF8 = {"a lone byte": b"\xff", "an overlong form": b"\xc0\x80", "a surrogate": b"\xed\xa0\x80", "half a form": b"\xe2\x82"}


@pytest.mark.parametrize("kind", NO_UTF8)
def test_headers_that_are_no_utf8_are_4(model_copy, kind):
    def edit(text):
        return b'{"__metadata__":{"k":"' + NO_UTF8[kind] + b'"},' + text.encode()[1:]

    for shard in model_copy.glob("model-*.safetensors"):
        rewrite_header(shard, edit)
    for verb in [["inspect", model_copy], ["run", "--model", model_copy]]:
        line = expect(4, *verb)
        assert "byte 22" in line and f"0x{NO_UTF8[kind][0]:02x}" in line and "fetch it again" in line


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", NO_UTF8)
def test_configs_and_indexes_that_are_no_utf8_are_4(model_copy, kind, file):
    path = model_copy / file
    path.write_bytes(path.read_bytes().replace(b"{", b'{"x' + NO_UTF8[kind] + b'":1,', 1))
    line = expect(4, "inspect", model_copy)
    assert file in line and "byte 3" in line and f"0x{NO_UTF8[kind][0]:02x}" in line


def test_names_from_files_reach_no_terminal_raw(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(FIXTURES / "mixtral-bf16", model)
    evil = "lm\x1b[31m\x07\x7f\u009b\nhead\u00e9"
    at = (model / "model.safetensors").stat().st_size

    def add(text, name):
        header = json.loads(text)
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        header[name] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}
        return json.dumps(header)

    rewrite_header(model / "model.safetensors", lambda text: add(text, evil))
    assert at < (model / "model.safetensors").stat().st_size
    done = moekit("inspect", model, "--tensors")
    assert done.returncode == 0
    assert r"lm\x1b[31m\x07\x7f\xc2\x9b\nhead\u00e9".replace(r"\u00e9", "\u00e9") in done.stdout
    assert not set(done.stdout) & {"\x1b", "\x07", "\x7f", "\x9b"}
    names = [t["name"] for t in json.loads(moekit("inspect", model, "--tensors", "--json").stdout)["tensors"]]
    assert evil in names
    # The same in an error: a tensor of the block that nothing reads.
    inside = next(name for name in names if ".experts." in name).rsplit("experts.", 1)[0] + "\x1b[2J"
    rewrite_header(model / "model.safetensors", lambda text: add(text, inside))
    assert r"\x1b[2J" in expect(4, "run", "--model", model)


def test_flipped_header_bits_never_crash(model_copy):
    shard = sorted(model_copy.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    rng = np.random.default_rng(11)
    for _ in range(40):
        data = bytearray(whole)
        at = int(rng.integers(0, 8 + length))
        data[at] ^= 1 << int(rng.integers(0, 8))
        shard.write_bytes(bytes(data))
        done = moekit("run", "--model", model_copy, "--random", 2)
        assert done.returncode in (0, 3, 4), f"byte {at}: {done.returncode} {done.stderr}"
        assert len(done.stderr.splitlines()) == (1 if done.returncode else 0)
