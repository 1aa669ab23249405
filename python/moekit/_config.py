"""What a layer is (MoEConfig) and how it shall run (plan options)."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import TYPE_CHECKING, Any

from . import _abi, _library
from .errors import InvalidArgumentError, WrongTypeError

if TYPE_CHECKING:
    from ._ranks import Rank


def number_of(value: str, names: tuple[str, ...], what: str) -> int:
    """The enumerator called `value`."""
    try:
        return names.index(value)
    except ValueError:
        raise InvalidArgumentError(
            f"{what} is {value!r}, expected one of {', '.join(names)}"
        ) from None


@dataclasses.dataclass(frozen=True)
class InputScheme:
    """The format in which a matrix reads its input.

    format: f32, bf16, fp8_tensor, fp8_token, fp8_block, mxfp8, mxfp4 or nvfp4.
    static_scale: the scale travels with the matrix (``Matrix.input_scale``); else it is dynamic.
    sense: whether the static scale "multiplies" codes or "divides" them.
    ue8m0_scale: dynamic scales are rounded up to powers of two.
    """

    format: str = "bf16"
    static_scale: bool = False
    sense: str = "multiplies"
    ue8m0_scale: bool = False

    def _c(self, what: str) -> _abi.InputScheme:
        return _abi.InputScheme(
            number_of(self.format, _abi.INPUT_FORMATS, what),
            self.static_scale,
            number_of(self.sense, _abi.SENSES, what + ".sense"),
            self.ue8m0_scale,
        )

    @staticmethod
    def _from_c(c: _abi.InputScheme) -> InputScheme:
        return InputScheme(
            _abi.INPUT_FORMATS[c.format], bool(c.static_scale), _abi.SENSES[c.sense], bool(c.ue8m0_scale)
        )


def parse_scheme(name: str, what: str = "scheme") -> _abi.WeightScheme:
    """ "fp8_block", "int4_g128", "int8_channel", ...; "_zp" at the end asks for zero points."""
    text = name.removesuffix("_zp")
    zero_points = text != name
    group = 0
    match = re.fullmatch(r"(int[48])_g(\d+)", text)
    if match:
        text, group = match[1] + "_group", int(match[2])
    if text not in _abi.WEIGHT_FORMATS or (text.endswith("_group") and group == 0):
        raise InvalidArgumentError(
            f"{what} is {name!r}, expected one of "
            f"{', '.join(f for f in _abi.WEIGHT_FORMATS if not f.endswith('_group'))}, "
            "int4_gN or int8_gN (and _zp for zero points)"
        )
    return _abi.WeightScheme(_abi.WEIGHT_FORMATS.index(text), group, zero_points)


def scheme_name(c: _abi.WeightScheme) -> str:
    name = _abi.WEIGHT_FORMATS[c.format]
    if name.endswith("_group"):
        name = f"{name.removesuffix('_group')}_g{c.group}"
    return name + ("_zp" if c.zero_points else "")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A layer as a model defines it. The C header moekit/c_api.h defines each field.

    Sizes that are 0 are taken from the weights. Weight formats are names: bf16, f16, f32,
    fp8_tensor, fp8_channel, fp8_block, mxfp8, mxfp8_e5m2, mxfp4, nvfp4, int4_gN, int8_gN,
    int4_channel, int8_channel; "" takes bf16, f16 or f32 from the dtype.
    """

    top_k: int = 0
    num_experts: int = 0
    hidden: int = 0
    inter: int = 0
    latent: int = 0
    activation: str = "silu"
    gated: bool = True
    activation_limit: float = math.inf
    activation_alpha: float = 1.702
    activation_beta: float = 1.0
    weight_on_input: bool = False
    gate_up_weights: str = ""
    down_weights: str = ""
    gate_up_input: InputScheme | None = None
    down_input: InputScheme | None = None
    scoring: str = "softmax"
    select_on: str = "scores"
    router_weight: str = "scores"
    renormalize: str = "none"
    epsilon: float = 0.0
    p: float = 1.0
    scaling_factor: float = 1.0
    num_groups: int = 0
    topk_groups: int = 0
    group_score: str = "top2_sum"
    hash_routing: bool = False
    shared_inter: int = 0
    shared_sigmoid_gate: bool = False
    shared_gate_up_weights: str = ""
    shared_down_weights: str = ""
    shared_gate_up_input: InputScheme | None = None
    shared_down_input: InputScheme | None = None

    def _c(self) -> _abi.Config:
        c = _library.default_config()
        for field in ("top_k", "num_experts", "hidden", "inter", "latent", "shared_inter"):
            setattr(c, field, _integer(getattr(self, field), field))
        for field in ("activation_limit", "activation_alpha", "activation_beta", "epsilon", "p"):
            setattr(c, field, getattr(self, field))
        c.scaling_factor = self.scaling_factor
        c.num_groups, c.topk_groups = self.num_groups, self.topk_groups
        c.activation = number_of(self.activation, _abi.ACTIVATIONS, "activation")
        c.scoring = number_of(self.scoring, _abi.SCORINGS, "scoring")
        c.select_on = number_of(self.select_on, _abi.SELECTS, "select_on")
        c.router_weight = number_of(self.router_weight, _abi.ROUTER_WEIGHTS, "router_weight")
        c.renormalize = number_of(self.renormalize, _abi.RENORMALIZES, "renormalize")
        c.group_score = number_of(self.group_score, _abi.GROUP_SCORES, "group_score")
        for field in ("gated", "weight_on_input", "hash_routing", "shared_sigmoid_gate"):
            setattr(c, field, bool(getattr(self, field)))
        for part in ("gate_up", "down", "shared_gate_up", "shared_down"):
            weights = parse_scheme(getattr(self, part + "_weights") or "bf16", part + "_weights")
            setattr(c, part + "_weights", weights)
            scheme = getattr(self, part + "_input")
            if scheme is None:  # as checkpoints without a word about inputs are read
                floats = _abi.WEIGHT_FORMATS[weights.format] in ("f16", "f32")
                scheme = InputScheme("f32" if floats else "bf16")
            setattr(c, part + "_input", scheme._c(part + "_input"))
        return c

    @staticmethod
    def _from_c(c: _abi.Config) -> MoEConfig:
        parts: dict[str, Any] = {}
        for part in ("gate_up", "down", "shared_gate_up", "shared_down"):
            parts[part + "_weights"] = scheme_name(getattr(c, part + "_weights"))
            parts[part + "_input"] = InputScheme._from_c(getattr(c, part + "_input"))
        return MoEConfig(
            top_k=c.top_k,
            num_experts=c.num_experts,
            hidden=c.hidden,
            inter=c.inter,
            latent=c.latent,
            activation=_abi.ACTIVATIONS[c.activation],
            gated=bool(c.gated),
            activation_limit=c.activation_limit,
            activation_alpha=c.activation_alpha,
            activation_beta=c.activation_beta,
            weight_on_input=bool(c.weight_on_input),
            scoring=_abi.SCORINGS[c.scoring],
            select_on=_abi.SELECTS[c.select_on],
            router_weight=_abi.ROUTER_WEIGHTS[c.router_weight],
            renormalize=_abi.RENORMALIZES[c.renormalize],
            epsilon=c.epsilon,
            p=c.p,
            scaling_factor=c.scaling_factor,
            num_groups=c.num_groups,
            topk_groups=c.topk_groups,
            group_score=_abi.GROUP_SCORES[c.group_score],
            hash_routing=bool(c.hash_routing),
            shared_inter=c.shared_inter,
            shared_sigmoid_gate=bool(c.shared_sigmoid_gate),
            **parts,
        )


def _integer(value: object, what: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise WrongTypeError(f"{what} must be an integer, got {value!r}")
    return int(value.__index__())


def parse_device(device: Any) -> tuple[int, int]:
    """DLPack's type and index of "cpu", "cuda", "cuda:1" or a torch.device."""
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", str(device))
    if match is None:
        raise InvalidArgumentError(f"device is {device!r}, expected cpu, cuda or cuda:N")
    return (_abi.CPU if match[0] == "cpu" else _abi.CUDA), int(match[1] or 0)


class Plan:
    """Plan options as the C ABI takes them; keeps alive what they point to."""

    def __init__(
        self,
        max_tokens: int,
        *,
        activations: str = "checkpoint",
        device: Any = "cpu",
        backend: str | None = None,
        prepare: str | None = None,
        rank: Rank | None = None,
        combine: str = "slots",
        combine_dtype: str | None = None,
        wire: str = "auto",
        placement: str | None = None,
        batch_invariant: bool | None = None,
        capacity: str = "exact",
        capacity_rows: int = 0,
        deadline: float = 30.0,
        num_threads: int = 0,
        checked: bool = True,
        pack_cache: str | os.PathLike[str] | None = None,
    ) -> None:
        o = _library.default_plan()
        o.max_tokens = _integer(max_tokens, "max_tokens")
        o.device.device_type, o.device.device_id = parse_device(device)
        on_gpu = o.device.device_type == _abi.CUDA
        if activations != "checkpoint":
            o.activations = number_of(activations, _abi.INPUT_FORMATS, "activations")
        self._texts = [_text(backend), _text(prepare), _text(placement), _text(pack_cache)]
        o.backend, o.prepare, o.placement, o.pack_cache = self._texts
        if rank is not None:
            o.group = rank._group_handle()
            o.rank = rank.index
        o.combine = number_of(combine, _abi.COMBINES, "combine")
        # Defaults of a GPU as the program has them: what its fast members take.
        slot_rows = combine_dtype or ("bf16" if on_gpu else "f32")
        o.combine_dtype = number_of(slot_rows, _abi.COMBINE_DTYPES, "combine_dtype")
        o.wire = number_of(wire, _abi.WIRES, "wire")
        o.batch_invariant = not on_gpu if batch_invariant is None else bool(batch_invariant)
        o.capacity = number_of(capacity, _abi.CAPACITIES, "capacity")
        o.capacity_rows = _integer(capacity_rows, "capacity_rows")
        if not 0 < deadline < 9e9:
            raise InvalidArgumentError(f"deadline is {deadline} s, expected a positive time")
        o.deadline_ns = int(deadline * 1e9)
        o.num_threads = _integer(num_threads, "num_threads")
        o.checked = bool(checked)
        self.c = o
        self.rank = rank
        self.max_tokens = int(o.max_tokens)


def _text(value: str | os.PathLike[str] | None) -> bytes | None:
    return None if value is None else os.fsencode(value)
