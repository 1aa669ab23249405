"""Weights from memory: a layer's matrices and vectors, checked and shown to the library."""

from __future__ import annotations

import ctypes
import dataclasses
from ctypes import POINTER
from typing import Any

import numpy as np

from . import _abi
from ._config import MoEConfig, number_of
from ._tensors import view
from .errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One weight matrix [N, K], or one of all experts [E, N, K], in its number format.

    codes: the weights, or their codes: fp8 as float8 or uint8 [.., K]; fp4 and int4 as pairs in
        uint8 [.., K/2], low nibble first; int8 as int8, or uint8 with 128 added.
    scales: as the format defines: [1], [N, 1], [N/128, K/128], [N, K/32], [N, K/16], [N, K/group].
    zeros: integer zero points, uint8 in the shape of scales.
    global_scale: nvfp4's float32 scale, one a matrix (stacked: one, or one an expert).
    input_scale: float32 static scale of the matrix's input.
    bias: [N], stacked [E, N].
    """

    codes: Any
    scales: Any = None
    zeros: Any = None
    global_scale: Any = None
    input_scale: Any = None
    bias: Any = None


def _matrix_c(matrix: Any, name: str, keep: list[Any]) -> _abi.Matrix:
    """The C struct of a Matrix or of a bare tensor; what it points to goes into `keep`."""
    m = matrix if isinstance(matrix, Matrix) else Matrix(matrix)
    c = _abi.Matrix()
    for field, value in (
        ("codes", m.codes),
        ("scales", m.scales),
        ("zeros", m.zeros),
        ("global_", m.global_scale),
        ("input_scale", m.input_scale),
        ("bias", m.bias),
    ):
        if value is not None:
            setattr(c, field, _tensor_c(value, f"{name}.{field.strip('_')}", keep))
    return c


def _tensor_c(value: Any, name: str, keep: list[Any]) -> Any:
    if isinstance(value, float):
        value = np.array([value], np.float32)
    shown = view(value, name)
    keep.append(shown)
    return shown.pointer


def _format_of(matrix: Any, named: str, what: str) -> str:
    """The name of a matrix's format: as given, else from a plain dtype."""
    if named:
        return named
    codes = matrix.codes if isinstance(matrix, Matrix) else matrix
    dtype = view(codes, what).dtype_name
    formats = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    if dtype not in formats:
        raise InvalidArgumentError(
            f"{what} is {dtype}, and the config names no format; "
            f"set MoEConfig.{what}_weights ('fp8_block', 'nvfp4', ...)"
        )
    return formats[dtype]


def _has_bias(matrices: Any) -> bool:
    several = matrices if isinstance(matrices, (list, tuple)) else (matrices,)
    return any(isinstance(m, Matrix) and m.bias is not None for m in several)


def _shape(matrix: Any, name: str) -> tuple[int, ...]:
    codes = matrix.codes if isinstance(matrix, Matrix) else matrix
    return view(codes, name).shape


class Weights:
    """Checks the weight arguments, completes the config's sizes and builds the C structs."""

    def __init__(self, config: MoEConfig, given: dict[str, Any]) -> None:
        self.keep: list[Any] = []
        self.tensors = t = _abi.LayerTensors()
        t.struct_size = ctypes.sizeof(t)
        t.matrix_size = ctypes.sizeof(_abi.Matrix)
        t.stacked_order = number_of(given["order"], _abi.ORDERS, "order")
        t.transposed = bool(given["transposed"])
        t.global_sense = number_of(given["global_sense"], _abi.SENSES, "global_sense")
        if given["down"] is None:
            raise InvalidArgumentError("down is missing: expected the experts' down matrices")
        stacked = not isinstance(given["down"], (list, tuple))
        sizes = self._stacked(config, given) if stacked else self._per_expert(config, given)
        for name in (
            "router_weight",
            "router_bias",
            "selection_bias",
            "shared_gate",
            "latent_in",
            "latent_out",
        ):
            if given[name] is not None:
                setattr(t, name, _tensor_c(given[name], name, self.keep))
        if given["latent_in"] is not None:
            latent, hidden = view(given["latent_in"], "latent_in").shape
            sizes.update(latent=latent, hidden=hidden)
        if given["shared_up_proj"] is not None:
            sizes.update(self._shared(config, given))
        # Sizes that the config names win: the library checks every tensor against them.
        named = {k: v for k, v in sizes.items() if not getattr(config, k)}
        self.config = dataclasses.replace(config, **named)
        self._given = given

    def config_c(self) -> _abi.Config:
        """The config as the library takes it: it announces the optional tensors that are given."""
        c = self.config._c()
        given = self._given
        c.has_gate_up_bias = any(_has_bias(given[name]) for name in ("gate_up", "gate", "up"))
        c.has_down_bias = _has_bias(given["down"])
        c.has_logit_bias = given["router_bias"] is not None
        c.has_selection_bias = given["selection_bias"] is not None
        return c

    def _shared(self, config: MoEConfig, given: dict[str, Any]) -> dict[str, Any]:
        for name in ("shared_gate_proj", "shared_up_proj", "shared_down_proj"):
            if given[name] is not None:
                self._matrix(name, given[name], name)
        up, down = given["shared_up_proj"], given["shared_down_proj"]
        if down is None:
            raise InvalidArgumentError("shared_up_proj comes with shared_down_proj")
        return {
            "shared_inter": _shape(up, "shared_up_proj")[0],
            "shared_gate_up_weights": _format_of(
                up, config.shared_gate_up_weights, "shared_gate_up"
            ),
            "shared_down_weights": _format_of(down, config.shared_down_weights, "shared_down"),
            "shared_sigmoid_gate": given["shared_gate"] is not None,
        }

    def _matrix(self, field: str, value: Any, name: str) -> None:
        c = _matrix_c(value, name, self.keep)
        self.keep.append(c)
        setattr(self.tensors, field, ctypes.pointer(c))

    def _stacked(self, config: MoEConfig, given: dict[str, Any]) -> dict[str, Any]:
        gate_up = given["gate_up"]
        if gate_up is None or given["gate"] is not None or given["up"] is not None:
            raise InvalidArgumentError(
                "a stacked down [E, hidden, inter] comes with gate_up [E, 2 inter, hidden]; "
                "for matrices per expert pass gate, up and down as lists"
            )
        self._matrix("gate_up_stacked", gate_up, "gate_up")
        self._matrix("down_stacked", given["down"], "down")
        rows, width = 1, 1
        first, second = _shape(gate_up, "gate_up"), _shape(given["down"], "down")
        if len(first) != 3 or len(second) != 3:
            raise InvalidArgumentError(
                f"stacked gate_up and down have three axes, got shapes {first} and {second}"
            )
        if given["transposed"]:
            rows = width = 2
        return {
            "num_experts": first[0],
            "inter": first[rows] // (2 if config.gated else 1),
            "hidden": second[width],
            "gate_up_weights": _format_of(gate_up, config.gate_up_weights, "gate_up"),
            "down_weights": _format_of(given["down"], config.down_weights, "down"),
        }

    def _per_expert(self, config: MoEConfig, given: dict[str, Any]) -> dict[str, Any]:
        up, down, gate = given["up"], given["down"], given["gate"]
        if given["gate_up"] is not None or not isinstance(up, (list, tuple)):
            raise InvalidArgumentError(
                "a list of down matrices comes with a list of up matrices (and of gate matrices)"
            )
        count = len(down)
        lists = [("up", up), ("down", down)]
        if config.gated:
            lists.append(("gate", gate))
        elif gate is not None:
            raise InvalidArgumentError("gate is given, but the config says gated=False")
        for name, matrices in lists:
            if not isinstance(matrices, (list, tuple)) or len(matrices) != count or count == 0:
                raise InvalidArgumentError(
                    f"gate, up and down must be lists of equal length, one matrix an expert; "
                    f"{name} does not fit the {count} matrices of down"
                )
            array = (_abi.Matrix * count)(
                *(_matrix_c(m, f"{name}[{e}]", self.keep) for e, m in enumerate(matrices))
            )
            self.keep.append(array)
            setattr(self.tensors, name, ctypes.cast(array, POINTER(_abi.Matrix)))
        return {
            "num_experts": count,
            "inter": _shape(up[0], "up[0]")[0],
            "hidden": _shape(down[0], "down[0]")[0],
            "gate_up_weights": _format_of(up[0], config.gate_up_weights, "gate_up"),
            "down_weights": _format_of(down[0], config.down_weights, "down"),
        }
