"""Makes transformers load compressed-tensors experts of every scheme that ``moekit quantize`` writes.

transformers decompresses experts by code of its own: it multiplies 8-bit floats by their scales as
they stand, which fails for blocks and groups of weights, and it drops the global scale of nvfp4,
which gives wrong numbers without an error. Here such experts go through compressed-tensors' own
decompression instead, a matrix at a time. Everything else is left to transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .errors import UnsupportedError

_FP8 = 8
_GLOBAL = "weight_global_scale"


def _parts(inputs: dict[str, Any]) -> dict[str, dict[str, list[torch.Tensor]]]:
    """The tensors of each matrix by name, an entry an expert: {"..gate_proj": {"weight": [..]}}."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for key, value in inputs.items():
        prefix, _, name = key.removesuffix("$").rpartition(".")
        if name.startswith("weight"):
            tensors = value if isinstance(value, list) else [value]
            found.setdefault(prefix, {})[name] = tensors
    return found


def _needs_help(weights: Any, file_format: str) -> bool:
    scaled_rows = str(getattr(weights.strategy, "value", weights.strategy)) in ("tensor", "channel")
    fp8 = weights.type == "float" and weights.num_bits == _FP8
    return (fp8 and not scaled_rows) or file_format.startswith("nvfp4")


def _decompressed(
    tensors: dict[str, list[torch.Tensor]], scheme: Any, file_format: str, dtype: torch.dtype
) -> torch.Tensor:
    """All experts of one matrix, [experts, N, K]."""
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(file_format)
    stacked: torch.Tensor | None = None
    experts = len(next(iter(tensors.values())))
    for expert in range(experts):
        module = torch.nn.Module()
        for name, values in tensors.items():
            parameter = torch.nn.Parameter(values[expert], requires_grad=False)
            module.register_parameter(name, parameter)
        module.quantization_scheme = scheme
        compressor.decompress_module(module)
        weight: Any = module.weight
        if stacked is None:
            stacked = torch.empty((experts, *weight.shape), dtype=dtype, device=weight.device)
        stacked[expert].copy_(weight)
    assert stacked is not None
    return stacked


def _mended(original: Callable[..., Any]) -> Callable[..., Any]:
    """`convert` of transformers' operation, with the experts that it gets wrong done here."""

    @functools.wraps(original)
    def convert(self: Any, input_dict: dict[str, Any], *args: Any, **more: Any) -> Any:
        from transformers.integrations import compressed_tensors as loader

        parts = _parts(input_dict)
        if not parts or not all("experts" in prefix for prefix in parts):
            return original(self, input_dict, *args, **more)
        config = self.hf_quantizer.compressor.quantization_config
        scheme = self.scheme or loader.get_experts_scheme(config)
        named = scheme.format or config.format
        file_format = str(getattr(named, "value", named))
        if not _needs_help(scheme.weights, file_format):
            return original(self, input_dict, *args, **more)
        dtype = more["model"].get_parameter(more["full_layer_name"]).dtype
        results = {}
        for prefix, tensors in parts.items():
            if file_format.startswith("nvfp4") and _GLOBAL not in tensors:
                raise UnsupportedError(
                    f"{prefix}: this version of transformers hands no {_GLOBAL} to its loader, "
                    "without which the weights would be wrong; 5.24 does"
                )
            name = "weight_packed" if "weight_packed" in tensors else "weight"
            key = next(k for k in input_dict if k.removesuffix("$") == f"{prefix}.{name}")
            results[key] = _decompressed(tensors, scheme, file_format, dtype)
        return results

    return convert


def register() -> None:
    """Wraps the operation by which transformers decompresses experts; once."""
    try:
        from transformers.integrations import compressed_tensors as loader
    except ImportError:
        return
    for name in ("CompressedTensorsDequantize", "DecompressExperts"):  # the latter before 5.24
        operation = getattr(loader, name, None)
        if operation is not None and not hasattr(operation.convert, "__wrapped__"):
            operation.convert = _mended(operation.convert)
