"""moekit.route, moekit.quantize and moekit.dequantize, and layers in every weight format."""

import ml_dtypes
import moekit
import numpy as np
import pytest
from weights import E, H, I, K, reference, relative, rows, weights

SCHEMES = ["fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "int4_g32", "int8_g32",
           "int4_g32_zp", "int8_channel", "int4_channel_zp"]
# Half a step of the code, relative to the largest of the values under one scale.
STEP = {"fp8": 1 / 16, "mxfp8": 1 / 16, "mxfp8_e5m2": 1 / 8, "mxfp4": 1 / 4, "nvfp4": 1 / 4, "int4": 1 / 7, "int8": 1 / 127}


def test_route_softmax():
    logits = rows(40, 12)
    ids, share = moekit.route(logits, 3)
    p = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64)
    p /= p.sum(1, keepdims=True)
    order = np.argsort(-p, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(share, np.take_along_axis(p, order, 1), rtol=1e-6)
    assert ids.dtype == np.int32 and share.dtype == np.float32


def test_route_with_bias_and_groups():
    logits = rows(30, 8)
    bias = np.linspace(-1, 1, 8).astype(np.float32)
    recipe = moekit.MoEConfig(scoring="sigmoid", renormalize="sum", num_groups=2, topk_groups=1, scaling_factor=2.5)
    ids, share = moekit.route(logits, 2, config=recipe, selection_bias=bias)
    assert all(set(row) <= set(range(4)) or set(row) <= set(range(4, 8)) for row in ids.tolist())
    np.testing.assert_allclose(share.sum(1), 2.5, rtol=1e-6)
    assert (share[:, 0] >= share[:, 1]).all()


def test_route_refuses():
    with pytest.raises(ValueError, match="logits"):
        moekit.route(np.zeros(4, np.float32), 2)
    with pytest.raises(moekit.InvalidArgumentError):
        moekit.route(np.zeros((2, 4), np.float32), 5)
    with pytest.raises(TypeError):
        moekit.route([[1.0, 2.0]], 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantize_rounds_to_the_format(scheme):
    w = rows(130, 192, seed=5)
    matrix = moekit.quantize(w, scheme)
    back = moekit.dequantize(matrix, scheme, w.shape)
    step = next(v for k, v in sorted(STEP.items(), key=lambda i: -len(i[0])) if scheme.startswith(k))
    assert np.abs(back - w).max() <= step * np.abs(w).max() * (2 if scheme.endswith("_zp") else 1)
    again = moekit.quantize(w, scheme, num_threads=1)
    np.testing.assert_array_equal(matrix.codes, again.codes)
    # What the format holds exactly comes back exactly.
    if "int" not in scheme:
        np.testing.assert_array_equal(moekit.dequantize(moekit.quantize(back, scheme), scheme, w.shape), back)


def test_fp8_codes_are_those_of_ml_dtypes():
    w = rows(16, 64, seed=6)
    matrix = moekit.quantize(w, "fp8_channel")
    assert matrix.scales.shape == (16, 1)
    wanted = (w / matrix.scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(matrix.codes, wanted)
    bf16 = moekit.quantize(w.astype(ml_dtypes.bfloat16), "fp8_block", scale_dtype="bf16")
    assert bf16.scales.dtype == ml_dtypes.bfloat16 and bf16.scales.shape == (1, 1)


def test_quantize_refuses():
    with pytest.raises(ValueError, match="finite"):
        moekit.quantize(np.full((2, 32), np.nan, np.float32), "mxfp8")
    with pytest.raises(ValueError, match="scheme"):
        moekit.quantize(rows(2), "fp7")
    with pytest.raises(ValueError, match="scale_dtype"):
        moekit.quantize(rows(2), "fp8_block", scale_dtype="f64")
    with pytest.raises(ValueError, match="weight must be"):
        moekit.dequantize(moekit.Matrix(np.zeros((2, 3), np.uint8), np.zeros((2, 1), np.float32)), "fp8_channel", (2, 8))


@pytest.mark.parametrize("scheme", ["bf16", "f16", *SCHEMES])
def test_layers_in_every_format(scheme):
    gate_up, down, router = weights()
    parts = {"gate": gate_up[:, :I], "up": gate_up[:, I:], "down": down}
    codes = {name: [moekit.quantize(m, scheme) for m in stack] for name, stack in parts.items()}
    exact = {
        name: np.stack([moekit.dequantize(m, scheme, parts[name][0].shape) for m in matrices])
        for name, matrices in codes.items()
    }
    config = moekit.MoEConfig(top_k=K, gate_up_weights=scheme, down_weights=scheme)
    layer = moekit.MoELayer(config, **codes, router_weight=router, activations="f32", num_threads=1)
    assert layer.config.gate_up_weights == scheme
    details = layer.details(rows(6))
    wanted = reference(rows(6), np.concatenate([exact["gate"], exact["up"]], 1), exact["down"], details.topk_ids,
                       details.topk_weights)
    assert relative(details.output, wanted) < 2e-6


def test_stacked_quantized_weights():
    gate_up, down, router = weights()

    def stack(matrices):
        made = [moekit.quantize(m, "mxfp4") for m in matrices]
        return moekit.Matrix(np.stack([m.codes for m in made]), np.stack([m.scales for m in made]))

    config = moekit.MoEConfig(top_k=K, gate_up_weights="mxfp4", down_weights="mxfp4")
    stacked = moekit.MoELayer(config, gate_up=stack(gate_up), down=stack(down), router_weight=router)
    single = moekit.MoELayer(
        config,
        gate=[moekit.quantize(m[:I], "mxfp4") for m in gate_up],
        up=[moekit.quantize(m[I:], "mxfp4") for m in gate_up],
        down=[moekit.quantize(m, "mxfp4") for m in down],
        router_weight=router,
    )
    np.testing.assert_array_equal(stacked(rows(5)), single(rows(5)))
    assert stacked.config.num_experts == E and stacked.config.hidden == H
