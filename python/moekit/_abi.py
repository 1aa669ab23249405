"""The structs and numbers of moekit/c_api.h, for ctypes. Field for field as declared there."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint8, c_uint16, c_uint32
from ctypes import c_uint64, c_void_p

ABI_MAJOR = 1
MAX_RANK = 6

CPU = 1
CUDA = 2


class Device(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class DType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class WeightScheme(ctypes.Structure):
    _fields_ = [("format", c_int32), ("group", c_int32), ("zero_points", c_int32)]


class InputScheme(ctypes.Structure):
    _fields_ = [
        ("format", c_int32),
        ("static_scale", c_int32),
        ("sense", c_int32),
        ("ue8m0_scale", c_int32),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("activation", c_int32),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("hidden", c_int64),
        ("inter", c_int64),
        ("latent", c_int64),
        ("gated", c_int32),
        ("activation_limit", c_float),
        ("activation_alpha", c_float),
        ("activation_beta", c_float),
        ("has_gate_up_bias", c_int32),
        ("has_down_bias", c_int32),
        ("weight_on_input", c_int32),
        ("gate_up_weights", WeightScheme),
        ("down_weights", WeightScheme),
        ("gate_up_input", InputScheme),
        ("down_input", InputScheme),
        ("scoring", c_int32),
        ("select_on", c_int32),
        ("router_weight", c_int32),
        ("renormalize", c_int32),
        ("epsilon", c_float),
        ("p", c_float),
        ("scaling_factor", c_float),
        ("num_groups", c_int32),
        ("topk_groups", c_int32),
        ("group_score", c_int32),
        ("has_logit_bias", c_int32),
        ("has_selection_bias", c_int32),
        ("hash_routing", c_int32),
        ("shared_sigmoid_gate", c_int32),
        ("reserved", c_int32),
        ("shared_inter", c_int64),
        ("shared_gate_up_weights", WeightScheme),
        ("shared_down_weights", WeightScheme),
        ("shared_gate_up_input", InputScheme),
        ("shared_down_input", InputScheme),
    ]


class PlanOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("activations", c_int32),
        ("max_tokens", c_int64),
        ("backend", c_char_p),
        ("prepare", c_char_p),
        ("device", Device),
        ("group", c_void_p),
        ("rank", c_int32),
        ("combine", c_int32),
        ("combine_dtype", c_int32),
        ("wire", c_int32),
        ("placement", c_char_p),
        ("batch_invariant", c_int32),
        ("capacity", c_int32),
        ("capacity_rows", c_int64),
        ("deadline_ns", c_int64),
        ("num_threads", c_int32),
        ("checked", c_int32),
        ("pack_cache", c_char_p),
        ("allocator", c_void_p),
    ]


AllGather = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, ctypes.c_size_t)
Barrier = ctypes.CFUNCTYPE(c_int32, c_void_p)


class Bootstrap(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("size", c_int32),
        ("num_nodes", c_int32),
        ("deadline_ns", c_int64),
        ("allgather", AllGather),
        ("barrier", Barrier),
        ("context", c_void_p),
    ]


class Matrix(ctypes.Structure):
    _fields_ = [
        ("codes", POINTER(Tensor)),
        ("scales", POINTER(Tensor)),
        ("zeros", POINTER(Tensor)),
        ("global_", POINTER(Tensor)),
        ("input_scale", POINTER(Tensor)),
        ("bias", POINTER(Tensor)),
    ]


class LayerTensors(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("matrix_size", c_uint32),
        ("gate", POINTER(Matrix)),
        ("up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
        ("gate_up_stacked", POINTER(Matrix)),
        ("down_stacked", POINTER(Matrix)),
        ("stacked_order", c_int32),
        ("transposed", c_int32),
        ("global_sense", c_int32),
        ("reserved", c_int32),
        ("router_weight", POINTER(Tensor)),
        ("router_bias", POINTER(Tensor)),
        ("selection_bias", POINTER(Tensor)),
        ("shared_gate_proj", POINTER(Matrix)),
        ("shared_up_proj", POINTER(Matrix)),
        ("shared_down_proj", POINTER(Matrix)),
        ("shared_gate", POINTER(Tensor)),
        ("latent_in", POINTER(Tensor)),
        ("latent_out", POINTER(Tensor)),
    ]


class RunArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("hidden", POINTER(Tensor)),
        ("hidden_scales", POINTER(Tensor)),
        ("hidden_global", POINTER(Tensor)),
        ("router_input", POINTER(Tensor)),
        ("topk_ids", POINTER(Tensor)),
        ("topk_weights", POINTER(Tensor)),
        ("token_ids", POINTER(Tensor)),
        ("output", POINTER(Tensor)),
        ("out_topk_ids", POINTER(Tensor)),
        ("out_topk_weights", POINTER(Tensor)),
        ("out_router_logits", POINTER(Tensor)),
        ("out_routed", POINTER(Tensor)),
        ("out_dropped", POINTER(c_int64)),
        ("stream", c_void_p),
        ("workspace", c_void_p),
    ]


class RouteArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_threads", c_int32),
        ("config", POINTER(Config)),
        ("logits", POINTER(Tensor)),
        ("selection_bias", POINTER(Tensor)),
        ("token_ids", POINTER(Tensor)),
        ("hash_table", POINTER(Tensor)),
        ("out_topk_ids", POINTER(Tensor)),
        ("out_topk_weights", POINTER(Tensor)),
    ]


class QuantizeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_threads", c_int32),
        ("scheme", WeightScheme),
        ("global_sense", c_int32),
        ("weights", POINTER(Tensor)),
        ("codes", POINTER(Tensor)),
        ("scales", POINTER(Tensor)),
        ("zeros", POINTER(Tensor)),
        ("global_", POINTER(Tensor)),
    ]


# Names of enumerators, in the order of their numbers.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2")
SCORINGS = ("softmax", "sigmoid", "sqrt_softplus", "logits")
SELECTS = ("scores", "logits")
ROUTER_WEIGHTS = ("scores", "softmax_selected", "sigmoid_logit")
RENORMALIZES = ("none", "sum", "max_sum", "p_norm")
GROUP_SCORES = ("max", "top2_sum")
COMBINES = ("slots", "rank_sums")
COMBINE_DTYPES = ("f32", "bf16")
WIRES = ("auto", "f32", "bf16", "fp8_token", "fp8_block", "mxfp8", "nvfp4")
CAPACITIES = ("exact", "refuse", "drop")
ORDERS = ("gate_up", "up_gate", "interleaved")
SENSES = ("multiplies", "divides")
WEIGHT_FORMATS = (
    "bf16",
    "f16",
    "f32",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "mxfp8",
    "mxfp8_e5m2",
    "mxfp4",
    "nvfp4",
    "int4_group",
    "int8_group",
    "int4_channel",
    "int8_channel",
)
INPUT_FORMATS = (
    "f32",
    "bf16",
    "fp8_tensor",
    "fp8_token",
    "fp8_block",
    "mxfp8",
    "mxfp4",
    "nvfp4",
)
INPUT_FROM_CHECKPOINT = -1
