"""moekit quantize: what it writes, and that it reads back as what quantizing in memory gives."""

import json
import shutil

import ml_dtypes
import moekit
import numpy as np
import pytest
from moekit_program import FIXTURES, json_lines, json_object, moekit as program
from tensor_files import read_safetensors

SCHEMES = ["fp8_channel", "fp8_block", "nvfp4", "mxfp4", "mxfp8"]
# Error of the block's output against the unquantized model, of the whole output.
LOSS = {"fp8_channel": 0.06, "fp8_block": 0.06, "mxfp8": 0.06, "nvfp4": 0.25, "mxfp4": 0.4}
FORMATS = {"fp8_channel": "float-quantized", "fp8_block": "float-quantized", "nvfp4": "nvfp4-pack-quantized",
           "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized", "int4_g128": "pack-quantized"}


def quantize(model, scheme, out, *more):
    return json_object("quantize", "--model", model, "--scheme", scheme, "--out", out, *more)


def all_tensors(folder):
    tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= read_safetensors(file)
    return tensors


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fixture", ["qwen3moe-bf16-sharded", "deepseekv3-bf16", "gptoss-bf16", "mixtral-bf16"])
def test_own_reader_takes_it(fixture, scheme, tmp_path):
    report = quantize(FIXTURES / fixture, scheme, tmp_path / "out")
    assert report["matrices"] > 0 and report["bytes_after"] < report["bytes_before"]
    lines = json_lines("check", "--model", tmp_path / "out", "--all-layers")
    assert lines and all(line["passed"] for line in lines if line["supported"])
    info = json_object("inspect", tmp_path / "out")
    assert info["quant_method"] == "compressed-tensors" and info["quant_format"] == FORMATS[scheme]
    scheme_of = {layer["scheme"]["weights"] for layer in info["layers"] if layer["kind"] == "moe"}
    assert scheme_of == {scheme}
    number = next(layer["index"] for layer in info["layers"] if layer["kind"] == "moe")
    golden = read_safetensors(FIXTURES / fixture / "golden.safetensors")
    x, wanted = golden[f"layer{number}.input"], golden[f"layer{number}.output"]
    layer = moekit.load_layer(tmp_path / "out", number, activations="f32", num_threads=1)
    ids, share = golden[f"layer{number}.topk_ids"], golden[f"layer{number}.topk_weights"]
    loss = np.linalg.norm(layer(x, ids, share) - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < loss < LOSS[scheme]


@pytest.mark.parametrize("scheme", [*SCHEMES, "int4_g128"])
def test_bytes_are_those_of_quantizing_in_memory(scheme, tmp_path):
    source = make_model(tmp_path / "plain", hidden=256, inter=128)
    quantize(tmp_path / "plain", scheme, tmp_path / "out")
    out = all_tensors(tmp_path / "out")
    module = "model.layers.0.mlp.experts.1."
    codes = "weight" if scheme.startswith("fp8") or scheme == "mxfp8" else "weight_packed"
    for name in ("gate_proj", "up_proj", "down_proj"):
        w = source[f"{module}{name}.weight"]
        made = moekit.quantize(w, scheme, scale_dtype="bf16", global_sense="divides")
        if scheme == "nvfp4" and name != "down_proj":
            # Gate and up share the global of the larger of the two.
            both = np.concatenate([source[f"{module}{half}.weight"] for half in ("gate_proj", "up_proj")])
            stacked = moekit.quantize(both, scheme, global_sense="divides")
            half = slice(0, 128) if name == "gate_proj" else slice(128, 256)
            made = moekit.Matrix(stacked.codes[half], stacked.scales[half], None, stacked.global_scale)
        stored = out[f"{module}{name}.{codes}"]
        np.testing.assert_array_equal(stored.view(np.uint8).reshape(made.codes.shape), made.codes)
        scale = out[f"{module}{name}.weight_scale"]
        assert scale.shape == made.scales.shape
        np.testing.assert_array_equal(scale, made.scales.astype(np.float32) if scale.dtype == np.float32 else made.scales)
        if scheme == "nvfp4":
            np.testing.assert_array_equal(out[f"{module}{name}.weight_global_scale"], made.global_scale)
        if scheme == "int4_g128":
            assert out[f"{module}{name}.weight_shape"].tolist() == list(w.shape)
            assert stored.dtype == np.int32


def make_model(folder, hidden, inter, experts=4):
    """A Qwen3-MoE checkpoint of one layer, bf16, written with NumPy; returns its tensors as float32."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": experts, "num_experts_per_tok": 2,
         "hidden_size": hidden, "moe_intermediate_size": inter, "hidden_act": "silu", "norm_topk_prob": True,
         "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 16, "num_attention_heads": 2}))
    shapes = {"model.layers.0.mlp.gate.weight": (experts, hidden), "model.norm.weight": (hidden,)}
    for e in range(experts):
        for name in ("gate_proj", "up_proj"):
            shapes[f"model.layers.0.mlp.experts.{e}.{name}.weight"] = (inter, hidden)
        shapes[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] = (hidden, inter)
    tensors = {k: rng.standard_normal(s).astype(ml_dtypes.bfloat16) for k, s in shapes.items()}
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in tensors.values())
    (folder / "model.safetensors").write_bytes(data)
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def test_everything_else_is_copied_and_threads_change_nothing(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3moe-bf16-sharded", model)
    (model / "tokenizer.json").write_text("{}")
    for number, threads in enumerate((1, 3)):
        quantize(model, "mxfp4", tmp_path / f"out{number}", "--threads", threads)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / f"out{n}").iterdir()} for n in (0, 1))
    assert first == second
    assert first["tokenizer.json"] == b"{}"
    index = json.loads(first["model.safetensors.index.json"])
    before, after = all_tensors(model), all_tensors(tmp_path / "out0")
    assert set(index["weight_map"]) == set(after)
    for file in set(index["weight_map"].values()):
        names = {n for n, f in index["weight_map"].items() if f == file}
        assert names == set(read_safetensors(tmp_path / "out0" / file))
    for name, tensor in before.items():
        if ".experts." not in name:
            np.testing.assert_array_equal(after[name], tensor)
    old, new = (json.loads((f / "config.json").read_text()) for f in (model, tmp_path / "out0"))
    config = new.pop("quantization_config")
    assert new == old
    assert config["quant_method"] == "compressed-tensors" and config["config_groups"]["group_0"]["targets"] == ["Linear"]
    ignored = set(config["ignore"])
    assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate"} <= ignored
    assert not any("experts" in name or "norm" in name or "embed" in name for name in ignored)


def test_layout_is_that_of_llm_compressor(tmp_path):
    """Same tensors, types and arguments as the fixture that llm-compressor wrote, for what both leave open."""
    quantize(FIXTURES / "qwen3moe-bf16-sharded", "fp8_channel", tmp_path / "out")
    ours = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    theirs = json.loads((FIXTURES / "mixtral-ct-fp8dynamic" / "config.json").read_text())["quantization_config"]
    assert set(ours) == set(theirs)
    group, other = ours["config_groups"]["group_0"], theirs["config_groups"]["group_0"]
    other["weights"]["observer"] = None
    assert group == other
    quantize(FIXTURES / "qwen3moe-bf16-sharded", "mxfp8", tmp_path / "mxfp8")
    ours = json_object("inspect", tmp_path / "mxfp8", "--tensors")["tensors"]
    theirs = json_object("inspect", FIXTURES / "qwen3moe-ct-mxfp8", "--tensors")["tensors"]
    kinds = {t["name"]: (t["dtype"], t["shape"]) for t in theirs if ".mlp.experts." in t["name"]}
    assert kinds == {t["name"]: (t["dtype"], t["shape"]) for t in ours if ".layers.0.mlp.experts." in t["name"]}


@pytest.mark.parametrize(
    ("model", "scheme", "status", "text"),
    [
        ("qwen3moe-bf16-sharded", "fp7", 2, "expected a scheme"),
        ("missing", "nvfp4", 2, "directory"),
        ("qwen3moe-ct-nvfp4", "nvfp4", 3, "quantized already"),
        ("qwen3moe-bf16-sharded", "int4_g128", 3, "whole groups of 128"),
        ("granitemoe-bf16", "fp8_block", 3, "no form in compressed-tensors"),
    ],
)
def test_refusals_leave_nothing(model, scheme, status, text, tmp_path):
    done = program("quantize", "--model", FIXTURES / model, "--scheme", scheme, "--out", tmp_path / "out")
    assert done.returncode == status and text in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_out_must_be_new_or_empty(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    (tmp_path / "empty").mkdir()
    arguments = ["quantize", "--model", FIXTURES / "mixtral-bf16", "--scheme", "mxfp8", "--out"]
    assert program(*arguments, tmp_path / "full").returncode == 2
    assert program(*arguments, tmp_path / "no" / "parent").returncode == 2
    assert (tmp_path / "full" / "file").read_text() == "kept"
    assert program(*arguments, tmp_path / "empty").returncode == 0
    assert (tmp_path / "empty" / "config.json").exists()
