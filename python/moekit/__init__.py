"""moekit: the fused Mixture-of-Experts layer.

>>> import moekit
>>> layer = moekit.load_layer("/models/Qwen3-30B-A3B", 0)
>>> output = layer(hidden)                          # routes by itself
>>> output = layer(hidden, topk_ids, topk_weights)  # or takes the routing

Tensors are NumPy arrays, torch tensors, or anything with ``__dlpack__`` or the buffer protocol,
and are never copied. torch is not needed; ``moekit.torch`` and ``moekit.transformers`` are the
parts for those who have it.
"""

from ._config import InputScheme, MoEConfig
from ._layer import Details, MoELayer, inspect, load_layer
from ._library import library_version as __version__
from ._quant import dequantize, quantize, route
from ._ranks import Rank, ThreadRanks, process_rank, thread_ranks
from ._weights import Matrix
from .errors import (
    CommError,
    CorruptFileError,
    CudaError,
    InternalError,
    InvalidArgumentError,
    MoekitError,
    OutOfMemoryError,
    TimeoutError_,
    UnsupportedError,
    WrongTypeError,
)

__all__ = [
    "CommError",
    "CorruptFileError",
    "CudaError",
    "Details",
    "InputScheme",
    "InternalError",
    "InvalidArgumentError",
    "Matrix",
    "MoEConfig",
    "MoELayer",
    "MoekitError",
    "OutOfMemoryError",
    "Rank",
    "ThreadRanks",
    "TimeoutError_",
    "UnsupportedError",
    "WrongTypeError",
    "__version__",
    "dequantize",
    "inspect",
    "load_layer",
    "process_rank",
    "quantize",
    "route",
    "thread_ranks",
]
