"""MoELayer: one MoE layer, planned and packed once, called many times."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64, c_void_p
from typing import Any

import numpy as np

from . import _abi, _library, _tvm_ffi
from ._config import MoEConfig, Plan
from ._ranks import Rank, peers_told
from ._tensors import View, current_stream, empty_like, stream_handle, view
from ._weights import Weights
from .errors import InvalidArgumentError, UnsupportedError, WrongTypeError

DEFAULT_MAX_TOKENS = 512
_SLOT_VIEWS = ("hidden", "ids", "weights", "output")


@dataclasses.dataclass
class Details:
    """Results of :meth:`MoELayer.details`. Arrays are NumPy's but for `output`."""

    output: Any
    """[T, hidden], of the kind and dtype of the input."""
    topk_ids: np.ndarray[Any, Any]
    """int32 [T, k], by descending weight."""
    topk_weights: np.ndarray[Any, Any]
    """float32 [T, k]."""
    router_logits: np.ndarray[Any, Any] | None
    """float32 [T, experts]; None where the call brought its own ids."""
    routed: np.ndarray[Any, Any]
    """float32 [T, hidden]: the routed experts alone, without shared ones."""
    dropped: int
    """(token, slot) pairs that capacity or unchecked bad ids dropped."""


class _Slot:
    """Structs of one call, made once and filled at each call: with routing and without."""

    __slots__ = ("plain", "routed", "plain_address", "routed_address", *_SLOT_VIEWS)

    def __init__(self) -> None:
        self.hidden, self.ids, self.weights, self.output = View(), View(), View(), View()
        self.plain, self.routed = _abi.RunArgs(), _abi.RunArgs()
        for args in (self.plain, self.routed):
            args.struct_size = ctypes.sizeof(_abi.RunArgs)
            args.hidden = self.hidden.pointer
            args.output = self.output.pointer
        self.routed.topk_ids = self.ids.pointer
        self.routed.topk_weights = self.weights.pointer
        self.plain_address = byref(self.plain)
        self.routed_address = byref(self.routed)


class MoELayer:
    """One MoE layer from weights in memory; :func:`load_layer` makes one from a checkpoint.

    ``layer(hidden)`` routes, runs the experts and adds shared ones; ``layer(hidden, topk_ids,
    topk_weights)`` skips the router. Calls release the GIL. Calls of one layer from several
    threads run one after the other; different layers run side by side.

    A layer planned with ``device="cuda"`` takes tensors of the host (the call returns when the
    output is written), or of that GPU: hidden and output bfloat16, topk_ids int32 and topk_weights
    float32, all contiguous. Those calls are enqueued on torch's current stream, or on `stream`, and
    return at once; they share the layer's memory, so calls on two streams must be ordered by the
    caller.

    After fork() the child makes its own copy of a layer of one rank at its first call (the threads
    of the library do not survive a fork); a layer of several ranks is refused there.
    """

    def __init__(
        self,
        config: MoEConfig | None = None,
        *,
        down: Any,
        gate_up: Any = None,
        gate: Sequence[Any] | None = None,
        up: Sequence[Any] | None = None,
        order: str = "gate_up",
        transposed: bool = False,
        global_sense: str = "multiplies",
        router_weight: Any = None,
        router_bias: Any = None,
        selection_bias: Any = None,
        shared_gate_proj: Any = None,
        shared_up_proj: Any = None,
        shared_down_proj: Any = None,
        shared_gate: Any = None,
        latent_in: Any = None,
        latent_out: Any = None,
        top_k: int | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        **plan: Any,
    ) -> None:
        """Packs the weights. They are not copied where the back-end reads them as they are, so
        they must not change afterwards.

        gate_up, down: stacked [E, 2 inter, hidden] and [E, hidden, inter] (`transposed`: the last
            two axes the other way round; `order`: gate_up, up_gate or interleaved), or
        gate, up, down: lists of one matrix an expert, [inter, hidden] and [hidden, inter].
        Each is a tensor or a :class:`Matrix` with scales.
        router_weight: [E, hidden]; without it calls must bring ids and weights.
        router_bias, selection_bias: [E].
        shared_gate_proj, shared_up_proj, shared_down_proj: matrices of the shared experts;
        shared_gate: [1, hidden], sigmoid gate of their output.
        latent_in, latent_out: [latent, hidden] and [hidden, latent].
        top_k: short for ``MoEConfig(top_k=...)``.
        max_tokens: the most tokens of one call. `plan`: see :func:`load_layer`.
        """
        given = {
            "down": down,
            "gate_up": gate_up,
            "gate": gate,
            "up": up,
            "order": order,
            "transposed": transposed,
            "global_sense": global_sense,
            "router_weight": router_weight,
            "router_bias": router_bias,
            "selection_bias": selection_bias,
            "shared_gate_proj": shared_gate_proj,
            "shared_up_proj": shared_up_proj,
            "shared_down_proj": shared_down_proj,
            "shared_gate": shared_gate,
            "latent_in": latent_in,
            "latent_out": latent_out,
        }
        with peers_told(plan.get("rank")):
            config = config or MoEConfig()
            if top_k is not None:
                config = dataclasses.replace(config, top_k=top_k)
            weights = Weights(config, given)
            c = weights.config_c()
            checked = Plan(max_tokens, **plan)

        def make(options: Plan, handle: c_void_p) -> int:
            return int(
                _library.lib.moekit_layer_create(
                    byref(c), byref(weights.tensors), byref(options.c), byref(handle)
                )
            )

        # `make` keeps the weights alive: the library may read them as long as the layer lives.
        self._setup(make, checked)

    @classmethod
    def _open(cls, path: bytes, layer: int, plan: Plan) -> MoELayer:
        self = cls.__new__(cls)

        def make(options: Plan, handle: c_void_p) -> int:
            return int(
                _library.lib.moekit_layer_open(path, layer, byref(options.c), byref(handle))
            )

        self._setup(make, plan)
        return self

    def _setup(self, make: Callable[[Plan, c_void_p], int], plan: Plan) -> None:
        self._make = make
        self._plan = plan
        self._slots: list[_Slot] = []
        self._generation = -1
        self._handle = c_void_p()
        self._create()
        c = _abi.Config()
        c.struct_size = ctypes.sizeof(c)
        _library.check(_library.lib.moekit_layer_config(self._handle, byref(c)))
        self.config = MoEConfig._from_c(c)
        self._width = self.config.hidden
        self._dense = (self._width, 1)

    def _create(self) -> None:
        handle = c_void_p()
        _library.check(self._make(self._plan, handle))
        self._handle = handle
        self._address = handle.value or 0
        self._generation = _library.generation

    def _after_fork(self) -> None:
        """The child of a fork lost the library's threads: it takes a layer of its own. The old
        handle is left alone, as freeing it would wait for threads that are gone."""
        if self._plan.rank is not None:
            raise UnsupportedError(
                f"this layer is rank {self._plan.rank.index} of {self._plan.rank.size} and was made "
                "before fork(); its peers do not live on in the child: make ranks and layers there"
            )
        self._slots = []
        self._create()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle and self._generation == _library.generation:
            _library.lib.moekit_layer_free(handle)

    @property
    def max_tokens(self) -> int:
        """The most tokens that one call takes."""
        return self._plan.max_tokens

    def explain(self) -> dict[str, Any]:
        """Every candidate with every reason, and the plan, as ``moekit explain --json`` has them."""
        text = c_void_p()
        _library.check(_library.lib.moekit_layer_explain(self._live(), byref(text)))
        result: dict[str, Any] = json.loads(_library.take_string(text))
        return result

    def _live(self) -> c_void_p:
        if self._generation != _library.generation:
            self._after_fork()
        return self._handle

    def __call__(
        self,
        hidden: Any,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        out: Any = None,
        stream: Any = None,
        **extra: Any,
    ) -> Any:
        """Runs the layer on `hidden` [T, hidden] (float32, bfloat16 or float16; rows may be
        strided) and returns the output [T, hidden] of the same kind and dtype, or `out`.

        topk_ids: int32 or int64 [T, k], -1 for "no expert"; topk_weights: float32 [T, k].
        out: [T, hidden], written instead of new memory; may not overlap an input.
        stream: CUDA stream of tensors on a GPU: an address, or an object of torch, CuPy or
            cuda.core; default: torch's current stream, elsewhere the default stream.
        Also token_ids [T] (hash routing), and for hidden states that arrive quantized:
        hidden_scales, hidden_global, router_input.
        """
        if self._generation != _library.generation:
            self._after_fork()
        if (topk_ids is None) != (topk_weights is None):
            raise InvalidArgumentError("topk_ids and topk_weights come together")
        torch: Any = _modules.get("torch")
        given_torch = torch is not None and isinstance(hidden, torch.Tensor)
        # A wrong shape becomes the library's error, which names it.
        if given_torch:
            if hidden.requires_grad:
                _refuse_gradients()
            if out is None:
                dense = hidden.stride() == self._dense
                out = torch.empty_like(hidden) if dense else self._new_tensor(hidden)
        elif out is None and type(hidden) is np.ndarray:
            out = np.empty((*hidden.shape[:1], self._width), hidden.dtype)
        run = _tvm_ffi.run or _tvm_ffi.find()
        if run is not None and stream is None and not extra:
            if (
                isinstance(out, torch.Tensor)
                if given_torch
                else _numpy_shows(hidden, out, topk_ids, topk_weights)
            ):
                try:
                    status = run(self._address, hidden, topk_ids, topk_weights, out)
                except _NOT_SHOWN:
                    pass  # ctypes takes it, or finds the words
                else:
                    if status:
                        _library.check(status)
                    return out
        return self._call_ctypes(hidden, topk_ids, topk_weights, out, stream, extra)

    def _new_tensor(self, hidden: Any) -> Any:
        return hidden.new_empty((*hidden.shape[:1], self._width))

    def _call_ctypes(
        self,
        hidden: Any,
        topk_ids: Any,
        topk_weights: Any,
        out: Any,
        stream: Any,
        extra: dict[str, Any],
    ) -> Any:
        on = current_stream(hidden) if stream is None else stream
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = _Slot()
        try:
            shown = slot.hidden.set(hidden, "hidden", stream=on)
            if out is None:
                out = empty_like(hidden, (*shown.shape[:1], self._width))
            slot.output.set(out, "out", True, on)
            if topk_ids is None:
                args, address = slot.plain, slot.plain_address
            else:
                slot.ids.set(topk_ids, "topk_ids", stream=on)
                slot.weights.set(topk_weights, "topk_weights", stream=on)
                args, address = slot.routed, slot.routed_address
            args.stream = None
            if shown.c.device.device_type == _abi.CUDA:
                args.stream = None if on is None else stream_handle(on)
            elif stream is not None:
                raise InvalidArgumentError("stream is given, but hidden lies on the host")
            if extra:
                return self._call_with(args, extra, out)
            status = _run(self._handle, address)
            if status:
                _library.check(status)
            return out
        finally:
            slot.hidden.owner = slot.output.owner = slot.ids.owner = slot.weights.owner = None
            self._slots.append(slot)

    def _call_with(self, args: _abi.RunArgs, extra: dict[str, Any], out: Any) -> Any:
        """A call with further tensors, on a copy of `args`."""
        full = _abi.RunArgs.from_buffer_copy(args)
        keep: list[Any] = []
        for name, value in extra.items():
            if name not in _EXTRA_INPUTS and name not in _EXTRA_OUTPUTS:
                raise WrongTypeError(f"a layer's call has no argument {name!r}")
            if name == "out_dropped":
                full.out_dropped = ctypes.pointer(value)
            elif value is not None:
                shown = view(value, name, writable=name in _EXTRA_OUTPUTS)
                keep.append(shown)
                setattr(full, name, shown.pointer)
        _library.check(_run(self._handle, byref(full)))
        return out

    def details(
        self, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, **extra: Any
    ) -> Details:
        """As a call, with the routing, the routed part and the count of dropped slots."""
        tokens = view(hidden, "hidden").shape[0]
        c = self.config
        ids = np.empty((tokens, c.top_k), np.int32)
        weights = np.empty((tokens, c.top_k), np.float32)
        routed = np.empty((tokens, c.hidden), np.float32)
        logits = None if topk_ids is not None else np.empty((tokens, c.num_experts), np.float32)
        dropped = c_int64(0)
        output = self(
            hidden,
            topk_ids,
            topk_weights,
            out_topk_ids=ids,
            out_topk_weights=weights,
            out_router_logits=logits,
            out_routed=routed,
            out_dropped=dropped,
            **extra,
        )
        return Details(output, ids, weights, logits, routed, dropped.value)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"<moekit.MoELayer E={c.num_experts} k={c.top_k} H={c.hidden} I={c.inter} "
            f"{c.gate_up_weights}, up to {self.max_tokens} tokens>"
        )


_run = _library.lib.moekit_layer_run
_modules = sys.modules
_EXTRA_INPUTS = frozenset({"token_ids", "hidden_scales", "hidden_global", "router_input"})
_EXTRA_OUTPUTS = frozenset(
    {"out_topk_ids", "out_topk_weights", "out_router_logits", "out_routed", "out_dropped"}
)


# What tvm-ffi throws at tensors that it can't show.
_NOT_SHOWN = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)


def _numpy_shows(hidden: Any, out: Any, *routing: Any) -> bool:
    """Whether these are arrays that NumPy exports through DLPack: ml_dtypes' types are none of its
    own. tvm-ffi does not see that memory is read-only or unaligned."""
    return (
        type(hidden) is np.ndarray
        and type(out) is np.ndarray
        and hidden.dtype.isbuiltin == 1
        and out.dtype.isbuiltin == 1
        and hidden.flags.aligned
        and out.flags.behaved
        and all(type(value) is not np.ndarray or value.flags.aligned for value in routing)
    )


def _refuse_gradients() -> None:
    if sys.modules["torch"].is_grad_enabled():
        raise UnsupportedError(
            "hidden requires a gradient, and moekit computes none; call under torch.no_grad()"
        )


def load_layer(
    model_dir: str | os.PathLike[str],
    layer: int | None = None,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    rank: Rank | None = None,
    **plan: Any,
) -> MoELayer:
    """Loads decoder layer `layer` (None: the first MoE layer) of a checkpoint directory.

    max_tokens: the most tokens of one call.
    rank: one of :func:`thread_ranks`; loading and calling are then collective.
    plan: device ("cpu", "cuda", "cuda:1"), activations ("checkpoint", "f32", "bf16", "fp8_token",
        ...), backend, prepare, combine ("slots", "rank_sums"), combine_dtype ("f32", "bf16";
        default: bf16 on a GPU), wire, placement, batch_invariant (default: not on a GPU),
        capacity ("exact", "refuse", "drop"), capacity_rows, deadline (seconds), num_threads
        (0: the CPUs of the process), checked, pack_cache. They are the flags of ``moekit run``.
    """
    with peers_told(rank):
        path = os.fsencode(model_dir)
        number = -1 if layer is None else layer
        if not isinstance(number, int) or isinstance(number, bool):
            raise WrongTypeError(f"layer must be an integer or None, got {layer!r}")
        if layer is not None and layer < 0:
            raise InvalidArgumentError(
                f"layer is {layer}, expected 0 or more, or None for the first"
            )
        checked = Plan(max_tokens, rank=rank, **plan)
    return MoELayer._open(path, number, checked)


def inspect(model_dir: str | os.PathLike[str], *, tensors: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, as ``moekit inspect --json`` has it, without loading it."""
    text = c_void_p()
    _library.check(
        _library.lib.moekit_inspect(os.fsencode(model_dir), int(tensors), byref(text))
    )
    result: dict[str, Any] = json.loads(_library.take_string(text))
    return result
