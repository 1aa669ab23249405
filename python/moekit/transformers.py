"""moekit as an experts implementation of Hugging Face transformers 5.

>>> import moekit.transformers
>>> model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moekit")

Importing this module registers "moekit" for plain experts (bfloat16, float16, float32) and for
transformers' own fp8 experts. Weights are packed at a module's first call and again when they
change; the model's own stay as they are. A model on a CUDA device runs there in bfloat16, where the
CUDA plug-in is installed; its experts are then kept in host memory as well. Where something is not
covered (gradients, another device, an activation that moekit does not have), the module falls back to "eager" with one
warning, or refuses with :class:`moekit.UnsupportedError` after ``configure(strict=True)`` or with
``MOEKIT_STRICT=1`` in the environment.

It also mends how transformers loads compressed-tensors experts in blocks, mxfp8 and nvfp4.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import warnings
import weakref
from typing import Any

import torch

from . import _compressed_experts
from ._config import InputScheme, MoEConfig
from ._layer import MoELayer
from ._weights import Matrix
from .errors import InvalidArgumentError, MoekitError, UnsupportedError
from .torch import on_torchs_threads

NAME = "moekit"


@dataclasses.dataclass
class _Options:
    strict: bool = os.environ.get("MOEKIT_STRICT", "0") not in ("", "0")
    max_tokens: int = 512
    num_threads: int = 0


_options = _Options()


def configure(
    *, strict: bool | None = None, max_tokens: int | None = None, num_threads: int | None = None
) -> None:
    """Settings of modules that are packed from now on.

    strict: refuse instead of falling back to "eager".
    max_tokens: tokens of one piece of a call; longer calls run in pieces (default 512, or the
        first call's tokens up to 4096).
    num_threads: 0 takes torch's (``torch.get_num_threads()`` as it is then).
    """
    if strict is not None:
        _options.strict = strict
    if max_tokens is not None:
        if max_tokens < 1:
            raise InvalidArgumentError(f"max_tokens is {max_tokens}, expected at least 1")
        _options.max_tokens = max_tokens
    if num_threads is not None:
        _options.num_threads = num_threads


@dataclasses.dataclass
class _Packed:
    key: tuple[Any, ...]
    layer: MoELayer


_packed: weakref.WeakKeyDictionary[torch.nn.Module, _Packed] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_warned: set[tuple[str, str]] = set()

_WEIGHTS = (
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
    "gate_up_proj_scale_inv",
    "up_proj_scale_inv",
    "down_proj_scale_inv",
)
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_DEVICES = ("cpu", "cuda")
_RUNS_ON = "moekit runs on CPUs and CUDA devices"


def _weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name in _WEIGHTS:
        value = module._parameters.get(name)
        if value is None:
            value = module._buffers.get(name)
        if value is not None:
            found[name] = value
    return found


def _version_of(tensor: torch.Tensor) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # an inference tensor: it can't change in place
        return -1


def _key_of(weights: dict[str, torch.Tensor], top_k: int) -> tuple[Any, ...]:
    return (top_k, *((name, w.data_ptr(), _version_of(w), w.dtype) for name, w in weights.items()))


def _refuse(reason: str) -> UnsupportedError:
    return UnsupportedError(reason)


# ---- which activation a module applies


def _reference_gate(
    gate: torch.Tensor, up: torch.Tensor, kind: str, limit: float, alpha: float, beta: float
) -> torch.Tensor:
    if limit != math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if kind == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    return _reference_act(gate, kind) * up


def _reference_act(x: torch.Tensor, kind: str) -> torch.Tensor:
    functional = torch.nn.functional
    if kind == "silu":
        return functional.silu(x)
    if kind == "gelu":
        return functional.gelu(x)
    if kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return torch.relu(x).square()


def _numbers_of(module: Any, *names: str) -> list[float]:
    values = []
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values.append(float(value))
    return values


def _activation_of(module: Any, gated: bool, interleaved: bool) -> dict[str, Any]:
    """Finds the activation by trying: whatever code a module runs, the numbers tell."""
    x = torch.linspace(-24.0, 24.0, 96).repeat(64, 1)
    x = x * torch.linspace(0.01, 1.0, 64)[:, None]
    other = x.flip(0).roll(17, 1)
    with torch.no_grad():
        if not gated:
            wanted = module.act_fn(x)
            for kind in ("silu", "gelu", "gelu_tanh", "relu2"):
                if torch.allclose(wanted, _reference_act(x, kind), rtol=1e-5, atol=1e-5):
                    return {"activation": kind, "gated": False}
            raise _refuse(f"the activation of {type(module).__name__} is none that moekit has")
        fused = (
            torch.stack((x, other), dim=-1).flatten(1) if interleaved else torch.cat((x, other), 1)
        )
        wanted = module._apply_gate(fused)
        limits = [math.inf, *_numbers_of(module, "limit", "swiglu_limit")]
        alphas = _numbers_of(module, "alpha", "swiglu_alpha") or [1.702]
        plain = itertools.product(("silu", "gelu", "gelu_tanh", "relu2"), limits, [1.702], [1.0])
        oai = itertools.product(("swiglu_oai",), limits, alphas, [1.0, 0.0])
        for kind, limit, alpha, beta in itertools.chain(plain, oai):
            found = _reference_gate(x, other, kind, limit, alpha, beta)
            if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-4):
                return {
                    "activation": kind,
                    "activation_limit": limit,
                    "activation_alpha": alpha,
                    "activation_beta": beta,
                }
    raise _refuse(f"the gate of {type(module).__name__} is none that moekit has")


# ---- packing


def _matrices(module: Any, weights: dict[str, torch.Tensor]) -> tuple[Matrix, Matrix, bool]:
    """The stacked matrices, and whether they are fp8 blocks."""
    first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    if first not in weights or "down_proj" not in weights:
        raise _refuse(f"{type(module).__name__} has no {first} and down_proj")
    scaled = f"{first}_scale_inv" in weights
    for name in (first, "down_proj"):
        w = weights[name]
        if type(w.data) is not torch.Tensor or w.device.type not in _DEVICES:
            raise _refuse(f"{name} is a {type(w.data).__name__} on {w.device}; {_RUNS_ON}")
        if not scaled and w.dtype not in _PLAIN:
            raise _refuse(f"{name} is {w.dtype}")
    if scaled:
        if tuple(getattr(module, "block_size", None) or ()) != (128, 128):
            raise _refuse("fp8 experts are covered with blocks of 128x128")
        if getattr(module, "activation_scheme", "dynamic") != "dynamic":
            raise _refuse("fp8 experts are covered with dynamic activation scales")
        if weights[first].dtype != torch.float8_e4m3fn:
            raise _refuse(f"{first} is {weights[first].dtype}, expected float8_e4m3fn")
    made = []
    for name in (first, "down_proj"):
        bias = weights.get(f"{name}_bias")
        made.append(  # layers are made from host memory
            Matrix(
                weights[name].detach().cpu(),
                scales=weights[f"{name}_scale_inv"].detach().cpu() if scaled else None,
                bias=None if bias is None else bias.detach().cpu(),
            )
        )
    return made[0], made[1], scaled


def _pack(
    module: Any, weights: dict[str, torch.Tensor], top_k: int, tokens: int
) -> MoELayer:
    gate_up, down, scaled = _matrices(module, weights)
    gated = bool(getattr(module, "has_gate", True))
    interleaved = not getattr(module, "is_concatenated", True)
    formats: dict[str, Any] = {}
    if scaled:
        e8m0 = gate_up.scales.dtype == getattr(torch, "float8_e8m0fnu", None)
        scheme = InputScheme("fp8_block", ue8m0_scale=e8m0)
        formats = {
            "gate_up_weights": "fp8_block",
            "down_weights": "fp8_block",
            "gate_up_input": scheme,
            "down_input": scheme,
        }
    config = MoEConfig(top_k=top_k, **_activation_of(module, gated, interleaved), **formats)
    return MoELayer(
        config,
        gate_up=gate_up,
        down=down,
        order="interleaved" if interleaved else "gate_up",
        transposed=bool(getattr(module, "is_transposed", False)),
        max_tokens=max(_options.max_tokens, min(tokens, 4096)),
        num_threads=_options.num_threads or torch.get_num_threads(),
        device=weights["down_proj"].device,
    )


def layer_of(module: torch.nn.Module, top_k: int, tokens: int = 1) -> MoELayer:
    """The packed layer of an experts module, made where it is missing or the weights changed."""
    weights = _weights_of(module)
    key = _key_of(weights, top_k)
    packed = _packed.get(module)
    if packed is None or packed.key != key:
        with _lock:
            packed = _packed.get(module)
            if packed is None or packed.key != key:
                packed = _Packed(key, _pack(module, weights, top_k, tokens))
                _packed[module] = packed
    return packed.layer


# ---- the experts function


def _eager(module: Any, *arguments: Any) -> torch.Tensor:
    forward = getattr(type(module).forward, "__wrapped__", None)
    if forward is None:
        raise _refuse(f"{type(module).__name__} has no eager forward to fall back to")
    result: torch.Tensor = forward(module, *arguments)
    return result


def _check_call(hidden: torch.Tensor, process_group: object) -> None:
    if hidden.requires_grad and torch.is_grad_enabled():
        raise _refuse("moekit computes no gradients; call the model under torch.no_grad()")
    if hidden.device.type not in _DEVICES:
        raise _refuse(f"the model is on {hidden.device}; {_RUNS_ON}")
    if hidden.device.type == "cuda" and hidden.dtype != torch.bfloat16:
        raise _refuse(f"the model's rows are {hidden.dtype}; on a GPU moekit takes bfloat16")
    if process_group is not None:
        raise _refuse("expert parallelism over a process group is not covered")


@torch.compiler.disable
def experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    process_group: object = None,
) -> torch.Tensor:
    """hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k] -> [T, H]."""
    try:
        _check_call(hidden_states, process_group)
        tokens, top_k = top_k_index.shape
        layer = layer_of(module, top_k, tokens)
    except MoekitError as reason:
        if _options.strict:
            raise
        note = (type(module).__name__, str(reason))
        if note not in _warned:
            _warned.add(note)
            warnings.warn(
                f"moekit falls back to eager experts in {note[0]}: {note[1]}", stacklevel=2
            )
        return _eager(module, hidden_states, top_k_index, top_k_weights)
    weights = top_k_weights.to(torch.float32)
    if hidden_states.device.type == "cuda":  # kernels read one layout
        hidden_states, weights = hidden_states.contiguous(), weights.contiguous()
        top_k_index = top_k_index.to(torch.int32).contiguous()
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    step = layer.max_tokens
    with torch.no_grad():
        for t in range(0, tokens, step):
            on_torchs_threads(
                layer,
                hidden_states[t : t + step],
                top_k_index[t : t + step],
                weights[t : t + step],
                out=out[t : t + step],
            )
    return out


def register() -> None:
    """Registers "moekit" with transformers; done by the import."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(
            f"moekit.transformers needs transformers 5.17 or later, got: {error}"
        ) from error
    ExpertsInterface.register(NAME, experts_forward)
    _compressed_experts.register()
    try:
        from transformers.integrations import finegrained_fp8
    except ImportError:
        return
    interface = getattr(finegrained_fp8, "FP8ExpertsInterface", None)
    if interface is not None:
        interface.register(NAME, experts_forward)
    # Plans of tensor parallelism look the implementation up here and fail on names they miss.
    overrides = getattr(
        getattr(finegrained_fp8, "FP8Experts", None), "_impl_tp_layer_overrides", None
    )
    if isinstance(overrides, dict):
        overrides.setdefault(NAME, {})


register()

__all__ = ["NAME", "configure", "experts_forward", "layer_of", "register"]
