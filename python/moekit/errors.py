"""Exceptions of moekit: one class for each status of the C ABI.

Every class derives from :class:`MoekitError` and from the builtin that code without knowledge of
moekit would catch. The message says what was expected, what came and what to do.
"""

from __future__ import annotations

__all__ = [
    "MoekitError",
    "InvalidArgumentError",
    "WrongTypeError",
    "UnsupportedError",
    "OutOfMemoryError",
    "CudaError",
    "CommError",
    "TimeoutError_",
    "CorruptFileError",
    "InternalError",
]


class MoekitError(Exception):
    """Base of all errors that moekit raises."""


class InvalidArgumentError(MoekitError, ValueError):
    """A value, shape, dtype, device or path that the call cannot take."""


class WrongTypeError(InvalidArgumentError, TypeError):
    """An argument of a Python type that the call cannot take, such as a list for a tensor."""


class UnsupportedError(MoekitError, NotImplementedError):
    """Well-formed, but not covered; the message holds the reasons of every back-end asked."""


class OutOfMemoryError(MoekitError, MemoryError):
    """Memory for a layer or a workspace could not be had."""


class CudaError(MoekitError, RuntimeError):
    """A call of the CUDA driver failed."""


class CommError(MoekitError, ConnectionError):
    """The group of ranks failed: a peer is gone, or the ranks disagree."""


class TimeoutError_(MoekitError, TimeoutError):
    """A wait for a peer passed its deadline; the message names rank, peer and phase."""


class CorruptFileError(MoekitError, ValueError):
    """Something inside a checkpoint or tensor file is malformed, contradictory or missing."""


class InternalError(MoekitError, RuntimeError):
    """A fault of moekit itself."""


# Numbers of moekit_status in moekit/c_api.h.
_BY_STATUS: dict[int, type[MoekitError]] = {
    1: InvalidArgumentError,
    2: UnsupportedError,
    3: OutOfMemoryError,
    4: CudaError,
    5: CommError,
    6: TimeoutError_,
    7: CorruptFileError,
    8: InternalError,
}


def error_of_status(status: int, message: str) -> MoekitError:
    """The exception for a moekit_status other than 0."""
    return _BY_STATUS.get(status, InternalError)(message)
