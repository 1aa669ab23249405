"""A layer's call through apache-tvm-ffi, where it is installed; ctypes does the same without it.

tvm-ffi hands tensors of torch and NumPy to the library, and torch's current CUDA stream with them,
without a line of Python for each. It is used once the program has imported torch (or tvm-ffi
itself): its own import brings torch along, which a program without torch shall not pay for.
``MOEKIT_TVM_FFI=0`` in the environment leaves it out.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import _library

# (layer's address, hidden, topk_ids, topk_weights, output) -> moekit_status
Run = Callable[[int, Any, Any, Any, Any], int]

run: Run | None = None
_settled = os.environ.get("MOEKIT_TVM_FFI", "") == "0"
_lock = threading.Lock()


def find() -> Run | None:
    """The call, or None where it can't be had (yet)."""
    global run, _settled
    if _settled or ("torch" not in sys.modules and "tvm_ffi" not in sys.modules):
        return run
    with _lock:
        if not _settled:
            run = _load()
            _settled = True
    return run


def _load() -> Run | None:
    try:
        import tvm_ffi
    except Exception:  # noqa: BLE001: absent, or at odds with this Python or torch
        return None
    # 0.X is the part of its version that names its binary interface.
    if not str(getattr(tvm_ffi, "__version__", "")).startswith("0.1."):
        return None
    torch: Any = sys.modules.get("torch")
    if torch is not None and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None  # a torch from before DLPack's C exchange: its Python way is no faster
    symbol = getattr(_library.lib, "__tvm_ffi_moekit_layer_run", None)
    if symbol is None:  # an older library
        return None
    address = ctypes.cast(symbol, ctypes.c_void_p).value
    function = tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=_library.lib)
    function.release_gil = True  # its default, which an environment variable can turn
    call: Run = function
    return call
