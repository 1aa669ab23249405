"""moekit inside torch: an operator that torch.compile knows, and a module around it.

>>> import moekit, moekit.torch
>>> block = moekit.torch.MoEModule(moekit.load_layer(model, 0))
>>> fast = torch.compile(block, fullgraph=True)
>>> with torch.no_grad():
...     y = fast(x)

The operators are ``torch.ops.moekit.moe`` (returns a new tensor) and ``torch.ops.moekit.moe_out``
(writes `out`). They take a layer by the number that :func:`register_layer` gives. Neither has a
gradient.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

from . import _library as _core
from ._layer import MoELayer
from .errors import InvalidArgumentError

_layers: weakref.WeakValueDictionary[int, MoELayer] = weakref.WeakValueDictionary()
_numbers: weakref.WeakKeyDictionary[MoELayer, int] = weakref.WeakKeyDictionary()
_next = itertools.count(1)
_lock = threading.Lock()


def register_layer(layer: MoELayer) -> int:
    """The number by which the operators know `layer`, as long as it lives."""
    with _lock:
        number = _numbers.get(layer)
        if number is None:
            number = next(_next)
            _numbers[layer] = number
            _layers[number] = layer
        return number


def _layer(number: int) -> MoELayer:
    layer = _layers.get(number)
    if layer is None:
        raise InvalidArgumentError(f"no layer has number {number} (it may have been freed)")
    return layer


_use_openmp: Any = getattr(_core.lib, "moekit_use_openmp", None)  # an older library has none


def on_torchs_threads(layer: MoELayer, *arguments: Any, **more: Any) -> Any:
    """Calls a layer on torch's OpenMP threads where torch has some: after each of torch's operators
    they spin for milliseconds on the cores that the library's own threads would need. Not in the
    child of a fork, where they are gone."""
    if _use_openmp is None or _core.generation > 0 or _use_openmp(1) != 0:
        return layer(*arguments, **more)
    try:
        return layer(*arguments, **more)
    finally:
        _use_openmp(0)


def _moe(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layer: int,
) -> torch.Tensor:
    result: torch.Tensor = on_torchs_threads(_layer(layer), hidden, topk_ids, topk_weights)
    return result


def _moe_cuda(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layer: int,
) -> torch.Tensor:
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    _moe_out_cuda(hidden, topk_ids, topk_weights, layer, out)
    return out


def _moe_fake(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layer: int,
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _moe_out(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layer: int,
    out: torch.Tensor,
) -> None:
    on_torchs_threads(_layer(layer), hidden, topk_ids, topk_weights, out=out)


def _moe_out_cuda(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layer: int,
    out: torch.Tensor,
) -> None:
    """Kernels read contiguous tensors, int32 ids and float32 weights: others are converted."""
    if topk_ids is not None and topk_weights is not None:
        topk_ids = topk_ids.to(torch.int32).contiguous()
        topk_weights = topk_weights.to(torch.float32).contiguous()
    _layer(layer)(hidden.contiguous(), topk_ids, topk_weights, out=out)


def _moe_out_fake(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layer: int,
    out: torch.Tensor,
) -> None:
    return None


_library = torch.library.Library("moekit", "DEF")
_library.define("moe(Tensor hidden, Tensor? topk_ids, Tensor? topk_weights, int layer) -> Tensor")
_library.define(
    "moe_out(Tensor hidden, Tensor? topk_ids, Tensor? topk_weights, int layer, Tensor(a!) out)"
    " -> ()"
)
_library.impl("moe", _moe, "CPU")
_library.impl("moe_out", _moe_out, "CPU")
_library.impl("moe", _moe_cuda, "CUDA")
_library.impl("moe_out", _moe_out_cuda, "CUDA")
torch.library.register_fake("moekit::moe", _moe_fake, lib=_library)
torch.library.register_fake("moekit::moe_out", _moe_out_fake, lib=_library)


class MoEModule(torch.nn.Module):
    """A :class:`moekit.MoELayer` as a module: [..., hidden] -> [..., hidden].

    Tokens beyond the layer's max_tokens run in pieces; a row's bits do not depend on that where
    the plan is batch_invariant. Rows on a GPU come with topk_ids and topk_weights: the layer's own
    router runs on the host.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer
        self.number = register_layer(layer)
        self.max_tokens = layer.max_tokens

    def forward(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [..., hidden]; topk_ids, topk_weights [tokens, k] over all leading axes."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        tokens, step = rows.shape[0], self.max_tokens
        if tokens <= step:
            pieces = [torch.ops.moekit.moe(rows, topk_ids, topk_weights, self.number)]
        else:
            pieces = [
                torch.ops.moekit.moe(
                    rows[t : t + step],
                    None if topk_ids is None else topk_ids[t : t + step],
                    None if topk_weights is None else topk_weights[t : t + step],
                    self.number,
                )
                for t in range(0, tokens, step)
            ]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole.reshape(hidden.shape)

    def extra_repr(self) -> str:
        return repr(self.layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoEModule:
        return MoEModule(self.layer)  # the packed weights are shared


__all__ = ["MoEModule", "register_layer"]
