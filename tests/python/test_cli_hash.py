"""Hash routing: experts by token id. The checkpoint is a DeepSeek-V4 one whose layer is turned into a hash layer."""

import json
import shutil
import struct

import numpy as np
import pytest

from moekit_program import FIXTURES, json_lines, json_object, moekit
from tensor_files import read_safetensors, write_safetensors

SOURCE = FIXTURES / "deepseekv4-bf16"
VOCABULARY, EXPERTS, TOP_K, HIDDEN, SCALE = 16, 8, 3, 128, 1.5
TABLE_NAME = "model.layers.0.ffn.gate.tid2eid"


def hash_table(seed=0):
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(VOCABULARY)], np.int64)


def rewrite(path, drop, added):
    """The file without the tensors `drop` and with `added` behind the others, raw bytes kept."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    old = json.loads(data[8 : 8 + length])
    header, blobs, at = {}, [], 0
    for name, entry in sorted(old.items(), key=lambda item: item[1].get("data_offsets", [0])[0]):
        if name == "__metadata__" or name in drop:
            continue
        begin, end = entry["data_offsets"]
        blobs.append(data[8 + length + begin : 8 + length + end])
        header[name] = {**entry, "data_offsets": [at, at + end - begin]}
        at += end - begin
    for name, array in added.items():
        blob = np.ascontiguousarray(array).tobytes()
        kind = {"int64": "I64", "int32": "I32", "float32": "F32"}[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def make_model(folder, table, **changes):
    shutil.copytree(SOURCE, folder)
    config = json.loads((folder / "config.json").read_text())
    config["mlp_layer_types"] = ["hash_moe"]
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    added = {} if table is None else {TABLE_NAME: table}
    rewrite(folder / "model.safetensors", {"model.layers.0.ffn.gate.bias"}, added)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("hash") / "model", hash_table())


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "x.npy"
    np.save(path, np.random.default_rng(3).standard_normal((20, HIDDEN)).astype(np.float32))
    return path


def save_ids(tmp_path, ids):
    np.save(tmp_path / "token_ids.npy", ids)
    return tmp_path / "token_ids.npy"


def expect(code, kind, *args):
    done = moekit(*args)
    assert done.returncode == code, f"{done.returncode}: {done.stderr}{done.stdout}"
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"moekit: {kind}: "), done.stderr
    return lines[0]


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("table_dtype", [np.int64, np.int32])
def test_experts_come_from_the_table_and_weights_from_the_logits(model, hidden, tmp_path, dtype, table_dtype):
    if table_dtype == np.int32:
        model = make_model(tmp_path / "model", hash_table().astype(np.int32))
    tokens = np.array([0, 15, 7, 7, 3, 1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 0, 15, 0], dtype)
    ids = save_ids(tmp_path, tokens)
    json_object("run", "--model", model, "--tokens", hidden, "--token-ids", ids, "--output", tmp_path / "a.safetensors")
    out = read_safetensors(tmp_path / "a.safetensors")
    table = hash_table()
    for t, token in enumerate(tokens):
        assert set(out["topk_ids"][t]) == set(table[token])
    scores = np.sqrt(np.logaddexp(0, out["router_logits"].astype(np.float64)))
    chosen = np.take_along_axis(scores, out["topk_ids"].astype(np.int64), 1)
    weights = chosen / (chosen.sum(1, keepdims=True) + 1e-20) * SCALE
    np.testing.assert_allclose(out["topk_weights"], weights, rtol=1e-5)
    # The same slots as precomputed ones: the same bits.
    np.save(tmp_path / "ids.npy", out["topk_ids"])
    np.save(tmp_path / "weights.npy", out["topk_weights"])
    json_object("run", "--model", model, "--tokens", hidden, "--topk-ids", tmp_path / "ids.npy", "--topk-weights",
                tmp_path / "weights.npy", "--output", tmp_path / "b.safetensors")
    np.testing.assert_array_equal(read_safetensors(tmp_path / "b.safetensors")["output"], out["output"])


@pytest.mark.parametrize("backend", ["ref", "cpu"])
def test_ranks_route_by_their_own_token_ids(model, hidden, tmp_path, backend):
    ids = save_ids(tmp_path, np.arange(20) * 7 % VOCABULARY)
    outputs = []
    for ranks in [1, 2, 3, 8]:
        path = tmp_path / f"{ranks}.safetensors"
        json_object("run", "--model", model, "--tokens", hidden, "--token-ids", ids, "--backend", backend, "--ranks",
                    ranks, "--output", path)
        outputs.append(read_safetensors(path))
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0]["topk_ids"], other["topk_ids"])
        np.testing.assert_array_equal(outputs[0]["output"], other["output"])


def test_ids_from_a_safetensors_file_and_check(model, hidden, tmp_path):
    write_safetensors(tmp_path / "x.safetensors",
                      {"ids": np.arange(20, dtype=np.int64) % VOCABULARY, "other": np.zeros(3, np.int32)})
    reference = f"{tmp_path / 'x.safetensors'}:ids"
    json_object("run", "--model", model, "--tokens", hidden, "--token-ids", reference)
    lines = json_lines("check", "--model", model, "--tokens", hidden, "--token-ids", reference)
    assert {line["backend"] for line in lines if line["passed"]} >= {"ref", "cpu"}


def test_random_tokens_bring_random_ids(model, tmp_path):
    json_object("run", "--model", model, "--random", 40, "--output", tmp_path / "a.safetensors")
    json_object("run", "--model", model, "--random", 40, "--output", tmp_path / "b.safetensors")
    a, b = (read_safetensors(tmp_path / name) for name in ["a.safetensors", "b.safetensors"])
    np.testing.assert_array_equal(a["topk_ids"], b["topk_ids"])
    rows = {tuple(sorted(row)) for row in hash_table()}
    assert {tuple(sorted(row)) for row in a["topk_ids"]} <= rows
    assert len({tuple(row) for row in a["topk_ids"]}) > 3


def test_tokens_of_a_file_need_ids(model, hidden):
    line = expect(2, "invalid_argument", "run", "--model", model, "--tokens", hidden)
    assert "--token-ids" in line


def test_token_ids_serve_the_hash_layers_among_all(model, hidden, tmp_path):
    ids = save_ids(tmp_path, np.arange(20) % VOCABULARY)
    lines = json_lines("check", "--model", model, "--all-layers", "--tokens", hidden, "--token-ids", ids)
    assert all(line["passed"] for line in lines if line["supported"])
    line = expect(2, "invalid_argument", "run", "--model", SOURCE, "--tokens", hidden, "--token-ids", ids)
    assert "--token-ids" in line and "routes by token id" in line


BAD_IDS = {
    "too few": (np.zeros(19, np.int64), "[20]"),
    "too many": (np.zeros(21, np.int64), "[20]"),
    "a matrix": (np.zeros((20, 1), np.int64), "[20]"),
    "floats": (np.zeros(20, np.float32), "--token-ids"),
    "beyond the table": (np.array([0] * 19 + [VOCABULARY], np.int64), "row 19"),
    "negative": (np.array([0, 0, -1] + [0] * 17, np.int64), "row 2"),
    "beyond 32 bits": (np.array([0, 1 << 40] + [0] * 18, np.int64), "row 1"),
}


@pytest.mark.parametrize("name", BAD_IDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ids_that_do_not_fit_are_2(model, hidden, tmp_path, name, ranks):
    ids, text = BAD_IDS[name]
    line = expect(2, "invalid_argument", "run", "--model", model, "--tokens", hidden, "--token-ids",
                  save_ids(tmp_path, ids), "--ranks", ranks, "--output", tmp_path / "out.npy")
    if ranks == 1 or "row" not in text:
        assert text in line
    assert not (tmp_path / "out.npy").exists()


def test_a_missing_ids_file_is_2(model, hidden):
    expect(2, "invalid_argument", "run", "--model", model, "--tokens", hidden, "--token-ids", "/nowhere/ids.npy")


BAD_TABLES = {
    "missing": None,
    "too few rows": hash_table()[:-1],
    "too few slots": hash_table()[:, :2],
    "floats": hash_table().astype(np.float32),
    "an expert beyond the layer": np.where(np.arange(VOCABULARY)[:, None] == 9, EXPERTS, hash_table()),
    "a negative expert": np.where(np.arange(VOCABULARY)[:, None] == 4, -1, hash_table()),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_wrong_table_is_4(tmp_path, name):
    broken = make_model(tmp_path / "model", BAD_TABLES[name])
    assert "tid2eid" in expect(4, "corrupt_file", "run", "--model", broken, "--random", 4)


def test_a_hash_layer_without_vocabulary_is_4(tmp_path):
    broken = make_model(tmp_path / "model", hash_table(), vocab_size=0)
    expect(4, "corrupt_file", "run", "--model", broken, "--random", 4)
