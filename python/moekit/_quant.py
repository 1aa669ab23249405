"""Number formats and routing as functions."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any

import numpy as np

from . import _abi, _library
from ._config import MoEConfig, number_of, parse_scheme
from ._tensors import numpy_dtype, view
from ._weights import Matrix
from .errors import InvalidArgumentError

_SCALE_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "e8m0": "float8_e8m0fnu"}
_PLAIN = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _scales_shape(scheme: _abi.WeightScheme, rows: int, cols: int) -> tuple[int, int]:
    name = _abi.WEIGHT_FORMATS[scheme.format]
    if name == "fp8_tensor":
        return 1, 1
    if name == "fp8_block":
        return _ceil(rows, 128), _ceil(cols, 128)
    if name.endswith("_channel"):
        return rows, 1
    if name.endswith("_group"):
        return rows, _ceil(cols, scheme.group)
    return rows, _ceil(cols, 16 if name == "nvfp4" else 32)


def quantize(
    weights: Any,
    scheme: str,
    *,
    scale_dtype: str = "f32",
    global_sense: str = "multiplies",
    num_threads: int = 0,
) -> Matrix:
    """Encodes `weights` [N, K] (float32, bfloat16 or float16) and returns a :class:`Matrix`.

    scheme: fp8_tensor, fp8_channel, fp8_block, mxfp8, mxfp8_e5m2, mxfp4, nvfp4, int4_gN, int8_gN,
        int4_channel, int8_channel ("_zp" adds zero points); bf16, f16 and f32 convert.
    scale_dtype: of fp8 and integer scales: f32, f16, bf16, or e8m0 (fp8 only).
    global_sense: whether nvfp4's global scale "multiplies" codes or "divides" them.

    Rounding is to nearest even, under the scale as stored; NaN and infinity are refused. Codes are
    NumPy arrays: uint8 [N, K] for fp8 (float8 with ml_dtypes' names is the same bytes) and int8
    (128 added), uint8 [N, ceil(K/2)] for four bits, low nibble first. Scales of mxfp8 and mxfp4
    (e8m0) and of nvfp4 (e4m3) are uint8. The same input gives the same bytes everywhere.
    """
    shown = view(weights, "weights")
    if len(shown.shape) != 2:
        raise InvalidArgumentError(f"weights must be [N, K], got shape {shown.shape}")
    rows, cols = shown.shape
    c = parse_scheme(scheme)
    name = _abi.WEIGHT_FORMATS[c.format]
    if scale_dtype not in _SCALE_DTYPES:
        raise InvalidArgumentError(
            f"scale_dtype is {scale_dtype!r}, expected one of {', '.join(_SCALE_DTYPES)}"
        )
    scales = zeros = global_scale = None
    if name in _PLAIN:
        codes = np.empty((rows, cols), numpy_dtype(_PLAIN[name]))
    else:
        four_bits = name in ("mxfp4", "nvfp4") or name.startswith("int4")
        codes = np.empty((rows, _ceil(cols, 2) if four_bits else cols), np.uint8)
        bytes_only = name.startswith("mx") or name == "nvfp4"
        unit = np.dtype(np.uint8) if bytes_only else numpy_dtype(_SCALE_DTYPES[scale_dtype])
        scales = np.empty(_scales_shape(c, rows, cols), unit)
        if c.zero_points:
            zeros = np.empty(scales.shape, np.uint8)
        if name == "nvfp4":
            global_scale = np.empty((1,), np.float32)
    result = Matrix(codes, scales, zeros, global_scale)
    args = _quantize_args(result, c, global_sense, num_threads)
    args.weights = shown.pointer
    _library.check(_library.need("moekit_quantize")(byref(args)))
    return result


def dequantize(
    matrix: Matrix,
    scheme: str,
    shape: tuple[int, int],
    *,
    global_sense: str = "multiplies",
    num_threads: int = 0,
) -> np.ndarray[Any, Any]:
    """The exact float32 values [N, K] of a :class:`Matrix` in the given format."""
    out = np.empty(shape, np.float32)
    args = _quantize_args(matrix, parse_scheme(scheme), global_sense, num_threads)
    shown = view(out, "out", writable=True)
    args.weights = shown.pointer
    _library.check(_library.need("moekit_dequantize")(byref(args)))
    return out


def _quantize_args(
    matrix: Matrix, scheme: _abi.WeightScheme, global_sense: str, num_threads: int
) -> Any:
    args = _abi.QuantizeArgs()
    args.struct_size = ctypes.sizeof(args)
    args.num_threads = num_threads
    args.scheme = scheme
    args.global_sense = number_of(global_sense, _abi.SENSES, "global_sense")
    args.keep = []  # the views must live as long as the struct
    for field, value in (
        ("codes", matrix.codes),
        ("scales", matrix.scales),
        ("zeros", matrix.zeros),
        ("global_", matrix.global_scale),
    ):
        if value is not None:
            shown = view(value, field.strip("_"))
            args.keep.append(shown)
            setattr(args, field, shown.pointer)
    return args


def route(
    logits: Any,
    top_k: int,
    *,
    config: MoEConfig | None = None,
    selection_bias: Any = None,
    num_threads: int = 0,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Chooses experts: logits [T, E] float32 -> ids int32 [T, k] and weights float32 [T, k].

    config: the recipe (scoring, select_on, router_weight, renormalize, epsilon, groups,
        scaling_factor, ...); its sizes are not used. Default: softmax, weights as they are.
    selection_bias: float32 [E], added for the choice only.

    Columns go by descending weight, then lower id; ties of the choice go to the lower id. NaN
    ranks below -inf, and ids are always distinct and in range.
    """
    shown = view(logits, "logits")
    if len(shown.shape) != 2:
        raise InvalidArgumentError(f"logits must be [T, E], got shape {shown.shape}")
    tokens, experts = shown.shape
    recipe = (config or MoEConfig())._c()
    recipe.num_experts, recipe.top_k = experts, top_k
    ids = np.empty((tokens, max(top_k, 0)), np.int32)
    weights = np.empty(ids.shape, np.float32)
    keep = [view(ids, "ids", True), view(weights, "weights", True)]
    args = _abi.RouteArgs()
    args.struct_size = ctypes.sizeof(args)
    args.num_threads = num_threads
    args.config = ctypes.pointer(recipe)
    args.logits = shown.pointer
    if selection_bias is not None:
        keep.append(view(selection_bias, "selection_bias"))
        args.selection_bias = keep[-1].pointer
    args.out_topk_ids, args.out_topk_weights = keep[0].pointer, keep[1].pointer
    _library.check(_library.need("moekit_route")(byref(args)))
    return ids, weights
