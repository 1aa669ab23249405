"""Finds libmoekit.so, checks its ABI and declares its functions.

The library is opened with ctypes.CDLL, so every call releases the GIL. Search order:
``MOEKIT_LIBRARY``, beside this file (the wheel), the loader's own path.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

from . import _abi
from .errors import MoekitError, error_of_status

_NAME = f"libmoekit.so.{_abi.ABI_MAJOR}"


def _load() -> tuple[ctypes.CDLL, str]:
    chosen = os.environ.get("MOEKIT_LIBRARY")
    beside = pathlib.Path(__file__).parent / "lib" / _NAME
    path = chosen or (str(beside) if beside.exists() else _NAME)
    try:
        return ctypes.CDLL(path), path
    except OSError as error:
        raise ImportError(
            f"expected {_NAME} at {beside} or on the loader's path, got: {error}; install the "
            "wheel, or set MOEKIT_LIBRARY to a built library"
        ) from error


def _declare(lib: ctypes.CDLL) -> None:
    handle = POINTER(c_void_p)  # where a handle or a string is put
    status = c_int32
    for name, result, arguments in (
        ("moekit_abi_version", c_uint32, []),
        ("moekit_version_string", c_char_p, []),
        ("moekit_last_error", c_char_p, []),
        ("moekit_config_init", status, [POINTER(_abi.Config), c_uint32]),
        ("moekit_plan_options_init", status, [POINTER(_abi.PlanOptions), c_uint32]),
        ("moekit_group_create", status, [c_int32, c_int64, c_int32, handle]),
        ("moekit_group_size", c_int32, [c_void_p]),
        ("moekit_group_free", None, [c_void_p]),
        ("moekit_group_create_processes", status, [POINTER(_abi.Bootstrap), handle]),
        ("moekit_group_create_mpi", status, [c_void_p, c_int64, c_int32, handle]),
        (
            "moekit_layer_open",
            status,
            [c_char_p, c_int32, POINTER(_abi.PlanOptions), handle],
        ),
        (
            "moekit_layer_create",
            status,
            [
                POINTER(_abi.Config),
                POINTER(_abi.LayerTensors),
                POINTER(_abi.PlanOptions),
                handle,
            ],
        ),
        ("moekit_layer_refuse", None, [c_void_p, c_int32, c_char_p]),
        ("moekit_layer_free", None, [c_void_p]),
        ("moekit_layer_config", status, [c_void_p, POINTER(_abi.Config)]),
        ("moekit_layer_explain", status, [c_void_p, handle]),
        ("moekit_inspect", status, [c_char_p, c_int32, handle]),
        ("moekit_string_free", None, [c_void_p]),
        ("moekit_layer_run", status, [c_void_p, POINTER(_abi.RunArgs)]),
        ("moekit_route", status, [POINTER(_abi.RouteArgs)]),
        ("moekit_quantize", status, [POINTER(_abi.QuantizeArgs)]),
        ("moekit_dequantize", status, [POINTER(_abi.QuantizeArgs)]),
        ("moekit_use_openmp", status, [c_int32]),
    ):
        function = getattr(lib, name, None)
        if function is None:
            continue  # an older library of the same ABI; `need` refuses at the call
        function.restype = result
        function.argtypes = arguments


lib, path = _load()
_declare(lib)
_version = lib.moekit_abi_version()
if _version >> 16 != _abi.ABI_MAJOR:
    raise ImportError(
        f"{path} has ABI {_version >> 16}, this package needs {_abi.ABI_MAJOR}; "
        "install package and library of one version"
    )
abi_minor: int = _version & 0xFFFF
library_version: str = lib.moekit_version_string().decode()

# Threads of the library do not live on in a forked child: handles of an older generation are
# neither run nor freed there.
generation = 0


def _after_fork() -> None:
    global generation
    generation += 1


os.register_at_fork(after_in_child=_after_fork)


def last_error() -> str:
    message: bytes = lib.moekit_last_error()
    return message.decode(errors="replace")


def check(status: int) -> None:
    """Raises the exception of a status other than MOEKIT_OK."""
    if status != 0:
        raise error_of_status(status, last_error())


def need(name: str) -> Any:
    """A function that an older library may lack."""
    function = getattr(lib, name, None)
    if function is None:
        raise MoekitError(f"{path} ({library_version}) has no {name}; install a newer libmoekit")
    return function


def take_string(pointer: c_void_p) -> str:
    """Copies a string of the library and frees it."""
    try:
        return (ctypes.cast(pointer, c_char_p).value or b"").decode()
    finally:
        lib.moekit_string_free(pointer)


def default_config() -> _abi.Config:
    config = _abi.Config()
    check(lib.moekit_config_init(byref(config), ctypes.sizeof(config)))
    return config


def default_plan() -> _abi.PlanOptions:
    options = _abi.PlanOptions()
    check(lib.moekit_plan_options_init(byref(options), ctypes.sizeof(options)))
    return options


__all__ = ["lib", "check", "need", "take_string", "default_config", "default_plan", "generation"]
