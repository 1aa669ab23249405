"""Views of other libraries' tensors, without copies.

A :class:`View` describes memory that stays its owner's: a torch tensor, a NumPy array (ml_dtypes
types included), any object with ``__dlpack__`` or the buffer protocol. It keeps the owner alive.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p, py_object
from typing import Any

import numpy as np

from . import _abi
from .errors import InvalidArgumentError, UnsupportedError, WrongTypeError

# DLPack's type code and bits by the name that NumPy, ml_dtypes and torch share; lanes are 1 but
# for torch's pairs of float4.
_DTYPES: dict[str, tuple[int, int, int]] = {
    "int8": (0, 8, 1),
    "int16": (0, 16, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "uint8": (1, 8, 1),
    "uint16": (1, 16, 1),
    "uint32": (1, 32, 1),
    "uint64": (1, 64, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "bfloat16": (4, 16, 1),
    "bool": (6, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}
_NAMES = {(code, bits): name for name, (code, bits, _) in _DTYPES.items()}

_numpy_dtypes: dict[Any, tuple[int, int, int]] = {}
_torch_dtypes: dict[Any, tuple[int, int, int]] = {}


def _torch() -> Any:
    """torch, where the program has imported it."""
    return sys.modules.get("torch")


def is_torch(value: object) -> bool:
    if type(value) is np.ndarray:
        return False
    torch = _torch()
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


class _DLManaged(ctypes.Structure):
    _fields_ = [("tensor", _abi.Tensor), ("manager", c_void_p), ("deleter", c_void_p)]


class _DLVersioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _abi.Tensor),
    ]


_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype = c_int
_capsule_is.argtypes = [py_object, c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = c_void_p
_capsule_pointer.argtypes = [py_object, c_char_p]

_Shape = c_int64 * _abi.MAX_RANK


class View:
    """A moekit_tensor over someone else's memory. Reusable: each `set` replaces what it shows."""

    __slots__ = ("c", "pointer", "shape", "owner", "_layout", "_shape", "_strides")

    def __init__(self) -> None:
        self.c = _abi.Tensor()
        self._shape = _Shape()
        self._strides = _Shape()
        self.c.shape = ctypes.cast(self._shape, POINTER(c_int64))
        self.c.strides = ctypes.cast(self._strides, POINTER(c_int64))
        self.c.byte_offset = 0
        self.pointer = ctypes.pointer(self.c)
        self.shape: tuple[int, ...] = ()
        self.owner: object = None
        # Dtype, shape and strides that the struct shows: calls in a row mostly change data alone.
        self._layout: object = None

    @property
    def dtype_name(self) -> str:
        return _NAMES.get((self.c.dtype.code, self.c.dtype.bits), "unknown")

    def set(
        self, value: Any, name: str, writable: bool = False, stream: Any = None
    ) -> View:
        """Shows `value`, which the caller keeps alive; what is made on the way is in `owner`.
        `writable` refuses read-only memory. `name` is used in messages. `stream`: that of CUDA
        memory's next use, for producers that order their own work before it."""
        if type(value) is np.ndarray:
            layout = (value.dtype, value.shape, value.strides)
            flags = value.flags
            if layout == self._layout and flags.aligned and (flags.writeable or not writable):
                self.c.data = value.__array_interface__["data"][0]
            else:
                self._layout = None
                self._set_numpy(value, name, writable)
                self._layout = layout
            return self
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            known = self._layout
            if (
                type(known) is list
                and value.layout is torch.strided
                and known == [value.dtype, value.shape, value.stride(), value.device]
            ):
                self.c.data = value.data_ptr()
            else:
                self._layout = None
                self._set_torch(value, name)
                self._layout = [value.dtype, value.shape, value.stride(), value.device]
            return self
        self._layout = None
        if isinstance(value, np.ndarray):
            self._set_numpy(value, name, writable)
        elif hasattr(value, "__dlpack__"):
            self._set_dlpack(value, name, writable, stream)
        else:
            self._set_buffer(value, name, writable)
        return self

    def _fill(
        self,
        data: int,
        dtype: tuple[int, int, int],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        name: str,
    ) -> None:
        rank = len(shape)
        if rank > _abi.MAX_RANK:
            raise InvalidArgumentError(
                f"{name}: expected at most {_abi.MAX_RANK} axes, got shape {tuple(shape)}"
            )
        c = self.c
        c.data = data
        c.ndim = rank
        c.dtype.code, c.dtype.bits, c.dtype.lanes = dtype
        for i in range(rank):
            self._shape[i] = shape[i]
            self._strides[i] = strides[i]
        self.shape = shape

    def _set_numpy(self, value: np.ndarray[Any, Any], name: str, writable: bool) -> None:
        dtype = value.dtype
        known = _numpy_dtypes.get(dtype)
        if known is None:
            if not dtype.isnative:
                raise InvalidArgumentError(
                    f"{name}: expected native byte order, got dtype {dtype.str!r}; "
                    "convert with .astype(dtype.newbyteorder('='))"
                )
            if dtype.name not in _DTYPES:
                raise InvalidArgumentError(f"{name}: dtype {dtype} is none that moekit knows")
            known = _numpy_dtypes.setdefault(dtype, _DTYPES[dtype.name])
        flags = value.flags
        if writable and not flags.writeable:
            raise InvalidArgumentError(f"{name} is written, but the array is read-only")
        if not flags.aligned:
            raise InvalidArgumentError(
                f"{name}: expected data aligned to its dtype, got an unaligned array; copy it"
            )
        size = dtype.itemsize
        strides = value.strides
        if any(s % size for s in strides):
            raise InvalidArgumentError(
                f"{name}: strides {strides} are no multiples of the {size}-byte dtype; copy it"
            )
        self.c.device.device_type = _abi.CPU
        self.c.device.device_id = 0
        data: int = value.__array_interface__["data"][0]
        self._fill(data, known, value.shape, tuple(s // size for s in strides), name)

    def _set_torch(self, value: Any, name: str) -> None:
        known = _torch_dtypes.get(value.dtype)
        if known is None:
            text = str(value.dtype).removeprefix("torch.")
            if text not in _DTYPES:
                raise InvalidArgumentError(f"{name}: dtype {value.dtype} is none that moekit knows")
            known = _torch_dtypes.setdefault(value.dtype, _DTYPES[text])
        device = value.device
        if device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(
                f"{name}: expected a tensor on the CPU or a CUDA device, got {device}"
            )
        if value.layout is not _torch().strided:
            raise InvalidArgumentError(f"{name}: expected a strided tensor, got {value.layout}")
        self.c.device.device_type = _abi.CPU if device.type == "cpu" else _abi.CUDA
        self.c.device.device_id = device.index or 0
        self._fill(value.data_ptr(), known, tuple(value.shape), value.stride(), name)

    def _set_dlpack(self, value: Any, name: str, writable: bool, stream: Any) -> None:
        how: dict[str, Any] = {}
        if stream is not None and value.__dlpack_device__()[0] == _abi.CUDA:
            how["stream"] = stream_handle(stream) or 1  # 1: the default stream
        try:
            capsule = value.__dlpack__(max_version=(1, 0), **how)
        except TypeError:  # a producer from before DLPack 1.0
            capsule = value.__dlpack__(**how)
        read_only = False
        if _capsule_is(capsule, b"dltensor_versioned"):
            versioned = _DLVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
            if versioned.major != 1:
                raise UnsupportedError(f"{name}: DLPack {versioned.major}.x is not covered")
            read_only = bool(versioned.flags & _READ_ONLY)
            tensor = versioned.tensor
        elif _capsule_is(capsule, b"dltensor"):
            tensor = _DLManaged.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
        else:
            raise WrongTypeError(f"{name}: __dlpack__ of {type(value).__name__} gave no DLPack")
        if writable and read_only:
            raise InvalidArgumentError(f"{name} is written, but the array is read-only")
        dtype = tensor.dtype
        if (dtype.code, dtype.bits) not in _NAMES:
            raise InvalidArgumentError(
                f"{name}: DLPack dtype code {dtype.code} with {dtype.bits} bits is none that "
                "moekit knows"
            )
        rank = tensor.ndim
        shape = tuple(tensor.shape[i] for i in range(rank))
        if tensor.strides:
            strides = tuple(tensor.strides[i] for i in range(rank))
        else:
            strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(rank))
        # The capsule is not taken over: its own end frees the view, after this one let go of it.
        self.owner = capsule
        self.c.device.device_type = tensor.device.device_type
        self.c.device.device_id = tensor.device.device_id
        data = (tensor.data or 0) + tensor.byte_offset
        self._fill(data, (dtype.code, dtype.bits, dtype.lanes), shape, strides, name)

    def _set_buffer(self, value: Any, name: str, writable: bool) -> None:
        interface = hasattr(value, "__array_interface__")
        if not interface:
            try:
                value = memoryview(value)
            except TypeError:
                raise WrongTypeError(
                    f"{name}: expected a tensor (NumPy, torch, __dlpack__ or the buffer protocol), "
                    f"got {type(value).__name__}"
                ) from None
        array = np.asarray(value)
        self.owner = array
        self._set_numpy(array, name, writable)


def current_stream(value: Any) -> int | None:
    """The stream on which a tensor on a GPU is used next: torch's current one; None: the default."""
    if not is_torch(value) or not value.is_cuda:
        return None
    handle: int = _torch()._C._cuda_getCurrentRawStream(value.device.index)
    return handle


def stream_handle(stream: Any) -> int:
    """The address of a CUDA stream of torch (cuda_stream), CuPy (ptr) or cuda.core, or itself."""
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise WrongTypeError(
            f"stream: expected an address or a stream of torch or CuPy, got {type(stream).__name__}"
        )
    return int(stream)


def view(value: object, name: str, writable: bool = False) -> View:
    """A new View that keeps `value` alive."""
    shown = View().set(value, name, writable)
    shown.owner = (value, shown.owner)
    return shown


def dtype_name(value: object, name: str = "tensor") -> str:
    """The dtype of a tensor by the name that NumPy and torch share ("bfloat16", ...)."""
    return view(value, name).dtype_name


def empty_like(value: object, shape: tuple[int, ...]) -> Any:
    """New memory of the kind and dtype of `value`: a torch tensor for torch, else a NumPy array."""
    if isinstance(value, np.ndarray):
        return np.empty(shape, value.dtype)
    if is_torch(value):
        return value.new_empty(shape)  # type: ignore[attr-defined]
    device = getattr(value, "__dlpack_device__", None)
    if device is not None and device()[0] == _abi.CUDA:
        raise UnsupportedError(
            f"a {type(value).__name__} lies on a GPU; pass out= with memory of the same device"
        )
    return np.empty(shape, numpy_dtype(dtype_name(value)))


def numpy_dtype(name: str) -> Any:
    """NumPy's dtype of that name; the small float types need the ml_dtypes package."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedError(
            f"NumPy has no {name}; pass out= with memory of your own, or install ml_dtypes"
        ) from None
    return np.dtype(getattr(ml_dtypes, name))
