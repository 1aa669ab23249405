"""experts_implementation="moekit": the same tokens as "eager" on small random models, and what happens where it can't."""

import gc
import json
import subprocess
import warnings

import moekit
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers 5.17 is not installed")
import moekit.transformers as adapter  # noqa: E402
from moekit_program import PROGRAM  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

COMMON = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
              pad_token_id=0)
CONFIGS = {
    "mixtral": ("MixtralConfig", dict(intermediate_size=96, num_local_experts=8, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3, head_dim=16,
                                         norm_topk_prob=True)),
    "deepseek_v3": ("DeepseekV3Config", dict(intermediate_size=96, moe_intermediate_size=32, n_routed_experts=8,
                                             num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1,
                                             q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16,
                                             v_head_dim=16, num_key_value_heads=4)),
    "gpt_oss": ("GptOssConfig", dict(intermediate_size=96, num_local_experts=8, num_experts_per_tok=3, head_dim=16)),
    "olmoe": ("OlmoeConfig", dict(intermediate_size=32, num_experts=8, num_experts_per_tok=3)),
}
# Of all logits. float32: two orders of summation. bfloat16: eager rounds every step to 8 bits, moekit only the input
# and the output of a matrix, twice a layer over two layers.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def make_model(name, dtype, **changes):
    """A model whose logits are spread by some units, so that greedy tokens mean something."""
    kind, options = CONFIGS[name]
    config = getattr(transformers, kind)(**{**COMMON, **options, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif "norm" not in name:
                weight.normal_(0, 0.1)
            if name.endswith(("router.weight", "gate.weight")):
                weight.mul_(4)
        model.lm_head.weight.mul_(8)
    return model


def run(model, ids):
    with torch.no_grad():
        logits = model(ids).logits.float()
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return logits, tokens


@pytest.fixture(autouse=True)
def strict():
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other
    adapter.configure(strict=True, max_tokens=512, num_threads=2)
    yield
    adapter.configure(strict=False, num_threads=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_eager(name, dtype):
    model = make_model(name, dtype)
    ids = torch.randint(1, 128, (2, 9))
    logits, tokens = run(model, ids)
    assert logits.std() > 1
    model.set_experts_implementation("moekit")
    with_moekit, same = run(model, ids)
    assert (with_moekit - logits).norm() <= BOUNDS[dtype] * logits.norm()
    assert torch.equal(same, tokens)
    assert sum(module in adapter._packed for module in model.modules()) == model.config.num_hidden_layers - (
        name == "deepseek_v3")
    formats = {adapter._packed[m].layer.config.gate_up_input.format for m in model.modules() if m in adapter._packed}
    assert formats == {"f32" if dtype == torch.float32 else "bf16"}


def test_from_pretrained_and_pieces(tmp_path):
    model = make_model("qwen3_moe", torch.float32)
    model.save_pretrained(tmp_path)
    adapter.configure(max_tokens=4)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moekit").eval()
    ids = torch.randint(1, 128, (1, 7))
    with torch.no_grad():
        loaded(ids[:, :2])  # packs for four tokens; what follows runs in pieces
        assert (loaded(ids).logits - model(ids).logits).abs().max() < 1e-3


def test_changed_weights_are_packed_again():
    model = make_model("mixtral", torch.float32)
    ids = torch.randint(1, 128, (1, 5))
    model.set_experts_implementation("moekit")
    with torch.no_grad():
        before = model(ids).logits
        for name, weight in model.named_parameters():
            if name.endswith("experts.down_proj"):
                weight.mul_(-1)
        after = model(ids).logits
        model.set_experts_implementation("eager")
        wanted = model(ids).logits
    assert (after - before).abs().max() > 0.1
    assert (after - wanted).norm() < 1e-5 * wanted.norm()


def test_gradients_fall_back_with_one_warning_or_are_refused():
    model = make_model("mixtral", torch.float32)
    ids = torch.randint(1, 128, (1, 5))
    wanted = model(ids).logits
    model.set_experts_implementation("moekit")
    with pytest.raises(moekit.UnsupportedError, match="no_grad"):
        model(ids)
    adapter.configure(strict=False)
    adapter._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = model(ids).logits
        model(ids)
    ours = [w for w in caught if "moekit" in str(w.message)]
    assert len(ours) == 1 and "no_grad" in str(ours[0].message)
    assert torch.equal(logits, wanted)
    logits.sum().backward()
    assert any(p.grad is not None for n, p in model.named_parameters() if n.endswith("experts.down_proj"))


def test_an_unknown_gate_falls_back():
    model = make_model("mixtral", torch.float32)
    ids = torch.randint(1, 128, (1, 5))
    experts = next(m for m in model.modules() if type(m).__name__ == "MixtralExperts")
    experts.act_fn = torch.nn.Softplus()
    model.set_experts_implementation("moekit")
    with torch.no_grad(), pytest.raises(moekit.UnsupportedError, match="gate of MixtralExperts"):
        model(ids)
    adapter.configure(strict=False)
    with torch.no_grad(), pytest.warns(UserWarning, match="falls back to eager"):
        adapter._warned.clear()
        logits = model(ids).logits
        model.set_experts_implementation("eager")
        assert (model(ids).logits - logits).abs().max() < 1e-3


def test_packed_layers_go_with_their_model():
    model = make_model("olmoe", torch.float32)
    model.set_experts_implementation("moekit")
    with torch.no_grad():
        model(torch.randint(1, 128, (1, 5)))
    count = len(adapter._packed)
    del model
    gc.collect()
    assert len(adapter._packed) <= count - 2


def test_fp8_experts_interface():
    """FP8Experts, whose eager path needs a GPU: against the same codes in float64."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    kind, options = CONFIGS["qwen3_moe"]
    config = getattr(transformers, kind)(**{**COMMON, **options, "hidden_size": 128, "moe_intermediate_size": 128})
    config._experts_implementation = "moekit"
    made = fp8.use_experts_implementation(
        experts_class=type("OwnExperts", (fp8.FP8Experts,), {}), experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    experts = made(config, block_size=(128, 128))
    torch.manual_seed(0)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            codes = torch.randn(getattr(experts, name).shape)
            getattr(experts, name).data = codes.to(torch.float8_e4m3fn)
            scale = getattr(experts, f"{name}_scale_inv")
            scale.data = torch.rand(scale.shape) * 0.1 + 0.02
        x = torch.randn(5, 128)
        ids = torch.randint(0, 8, (5, 3))
        share = torch.rand(5, 3)
        y = experts(x, ids, share)
        spread = [s.repeat_interleave(128, 1).repeat_interleave(128, 2).double()
                  for s in (experts.gate_up_proj_scale_inv, experts.down_proj_scale_inv)]
        gate_up, down = experts.gate_up_proj.double() * spread[0], experts.down_proj.double() * spread[1]
        wanted = torch.zeros(5, 128, dtype=torch.float64)

        def rounded(v):
            scale = v.abs().amax().float() / 448
            return (v.float() / scale).to(torch.float8_e4m3fn).double() * scale

        for t in range(5):
            for e, w in zip(ids[t], share[t]):
                gate, up = (gate_up[e] @ rounded(x[t])).chunk(2)
                wanted[t] += w * (down[e] @ rounded(torch.nn.functional.silu(gate) * up))
    assert (y - wanted).norm() < 2e-3 * wanted.norm()


# fp8 blocks, mxfp8 and nvfp4 load as moekit.transformers mends the loader; nvfp4 where transformers hands it the scale.
@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block", "nvfp4", "mxfp4", "mxfp8", "int4_g128"])
def test_transformers_reads_what_quantize_writes(scheme, tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers.integrations import compressed_tensors as loader

    model = make_model("qwen3_moe", torch.bfloat16, hidden_size=256, moe_intermediate_size=128)
    model.save_pretrained(tmp_path / "plain")
    command = [str(PROGRAM), "quantize", "--model", tmp_path / "plain", "--scheme", scheme, "--out", tmp_path / "small"]
    subprocess.run([str(c) for c in command], check=True, capture_output=True)
    if scheme == "nvfp4" and not hasattr(loader, "CompressedTensorsDequantize"):
        with pytest.raises(Exception, match="conversion"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "small")
        return
    # Experts are dequantized to bfloat16 whatever is asked for; computed in float32 here.
    block = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval().model.layers[1].mlp.float()
    x = torch.randn(6, 256)
    with torch.no_grad():
        wanted = block(x[None])
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted)[0]
    layer = moekit.load_layer(tmp_path / "small", 1, activations="f32")
    # bfloat16 weights: 2^-9 each.
    assert (layer(x) - wanted).norm() < 5e-3 * wanted.norm()
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block", "nvfp4", "mxfp4", "mxfp8", "int4_g128"])
def test_compressed_tensors_reads_what_quantize_writes(scheme, tmp_path):
    """Matrix by matrix through compressed-tensors' own decompression: the same numbers, rounded to bfloat16."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    model = make_model("qwen3_moe", torch.bfloat16, hidden_size=256, moe_intermediate_size=128)
    model.save_pretrained(tmp_path / "plain")
    command = [str(PROGRAM), "quantize", "--model", tmp_path / "plain", "--scheme", scheme, "--out", tmp_path / "small"]
    subprocess.run([str(c) for c in command], check=True, capture_output=True)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    before = load_file(tmp_path / "plain" / "model.safetensors")
    for name in ("gate_proj", "up_proj", "down_proj"):
        module = torch.nn.Module()
        prefix = f"model.layers.1.mlp.experts.2.{name}."
        for key, value in tensors.items():
            if key.startswith(prefix):
                module.register_parameter(key.removeprefix(prefix), torch.nn.Parameter(value, requires_grad=False))
        module.quantization_scheme = group
        BaseCompressor.get_value_from_registry(config["format"]).decompress_module(module)
        weight = before[prefix + "weight"].float()
        made = moekit.quantize(weight, scheme, scale_dtype="bf16", global_sense="divides")
        exact = torch.from_numpy(moekit.dequantize(made, scheme, tuple(weight.shape), global_sense="divides"))
        if scheme == "nvfp4" and name != "down_proj":  # gate and up share a global: other rounding
            assert (module.weight.float() - weight).norm() < 0.15 * weight.norm()
        else:
            assert (module.weight.float() - exact).abs().max() <= exact.abs().max() * 2**-8
