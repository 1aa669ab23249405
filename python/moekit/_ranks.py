"""Expert-parallel ranks: threads of this process, or processes."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_void_p
from typing import Any, TypeVar

from . import _abi, _library
from .errors import InvalidArgumentError, WrongTypeError

T = TypeVar("T")


class _Group:
    """Owns a moekit_group handle."""

    def __init__(self, handle: c_void_p, size: int) -> None:
        self.handle = handle
        self.size = size
        self.generation = _library.generation

    def __del__(self) -> None:
        if self.generation == _library.generation:
            _library.lib.moekit_group_free(self.handle)


class Rank:
    """One rank of a group: pass it as ``rank=`` to :func:`load_layer` or :class:`MoELayer`."""

    def __init__(self, group: _Group, index: int) -> None:
        self._group = group
        self.index = index

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._group.size

    def _group_handle(self) -> c_void_p:
        if self._group.generation != _library.generation:
            raise InvalidArgumentError(
                "these ranks were made before fork(), and their threads do not live on in the "
                "child; make them after fork()"
            )
        return self._group.handle


@contextlib.contextmanager
def peers_told(rank: Any) -> Iterator[None]:
    """Around what a rank does before the library makes its layer: where it fails here, the ranks
    that make the layer with it get its words instead of waiting for it."""
    try:
        yield
    except Exception as error:
        refuse = getattr(_library.lib, "moekit_layer_refuse", None)  # an older library has none
        if (
            refuse is not None
            and isinstance(rank, Rank)
            and rank._group.generation == _library.generation
        ):
            refuse(rank._group.handle, rank.index, str(error).encode(errors="replace"))
        raise


class ThreadRanks:
    """Ranks that are threads of this process; made by :func:`thread_ranks`."""

    def __init__(self, group: _Group) -> None:
        self._ranks = tuple(Rank(group, i) for i in range(group.size))

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, index: int) -> Rank:
        return self._ranks[index]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def run(self, body: Callable[[Rank], T]) -> list[T]:
        """Calls ``body(rank)`` once on a thread of each rank and returns the results by rank.

        Loading and calling a layer are collective, so every rank must do the same. The first
        error of the lowest rank is raised again here, after all threads have ended.
        """
        results: list[Any] = [None] * len(self._ranks)
        errors: list[BaseException | None] = [None] * len(self._ranks)

        def work(rank: Rank) -> None:
            try:
                results[rank.index] = body(rank)
            except BaseException as error:  # noqa: BLE001: given to the caller below
                errors[rank.index] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in self._ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                raise error
        return results


def thread_ranks(size: int, *, deadline: float = 30.0, num_nodes: int = 1) -> ThreadRanks:
    """Makes `size` ranks in this process.

    Every wait between them ends after `deadline` seconds with :class:`TimeoutError_`. `num_nodes`
    pretends that the ranks stand on that many hosts.

    >>> ranks = moekit.thread_ranks(2)
    >>> def work(rank):
    ...     layer = moekit.load_layer(model, rank=rank)
    ...     return layer(hidden[rank.index])
    >>> outputs = ranks.run(work)
    """
    handle = c_void_p()
    if not 0 < deadline < 9e9:
        raise InvalidArgumentError(f"deadline is {deadline} s, expected a positive time")
    if not isinstance(size, int) or not isinstance(num_nodes, int):
        raise InvalidArgumentError(f"size and num_nodes are integers, got {size!r}, {num_nodes!r}")
    _library.check(
        _library.lib.moekit_group_create(
            ctypes.c_int32(size), int(deadline * 1e9), num_nodes, byref(handle)
        )
    )
    return ThreadRanks(_Group(handle, size))


def process_rank(
    group: Any = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    allgather: Callable[[bytes], Sequence[bytes]] | None = None,
    transport: str = "shm",
    deadline: float = 30.0,
    num_nodes: int = 0,
) -> Rank:
    """This process's rank of a group of processes. Collective.

    group: an mpi4py communicator or a torch.distributed process group, which only bootstraps;
        the caller's own subgroup, never the world by itself. Or
    rank, size, allgather: ``allgather(data)`` returns what every rank passed, by rank.
    transport: "shm" (shared memory of one host), or "mpi" (mpi4py communicators, hosts too).
    num_nodes: 0 counts hosts; more pretends that the ranks stand on that many.

    >>> from mpi4py import MPI
    >>> layer = moekit.load_layer(model, rank=moekit.process_rank(MPI.COMM_WORLD))
    """
    if not 0 < deadline < 9e9:
        raise InvalidArgumentError(f"deadline is {deadline} s, expected a positive time")
    handle = c_void_p()
    if transport == "mpi":
        if group is None or not hasattr(group, "Get_rank"):
            raise InvalidArgumentError('transport "mpi" needs an mpi4py communicator')
        mpi: Any = sys.modules["mpi4py.MPI"]
        status = _library.need("moekit_group_create_mpi")(
            mpi._addressof(group), int(deadline * 1e9), num_nodes, byref(handle)
        )
        _library.check(status)
        return Rank(_Group(handle, group.Get_size()), group.Get_rank())
    if transport != "shm":
        raise InvalidArgumentError(f"transport is {transport!r}, expected shm or mpi")
    if group is not None:
        rank, size, allgather = _bootstrap_of(group)
    if rank is None or size is None or allgather is None:
        raise InvalidArgumentError("expected a group, or all of rank, size and allgather")
    return _bootstrapped(rank, size, allgather, deadline, num_nodes)


def _bootstrap_of(group: Any) -> tuple[int, int, Callable[[bytes], Sequence[bytes]]]:
    if hasattr(group, "Get_rank") and hasattr(group, "allgather"):
        return group.Get_rank(), group.Get_size(), group.allgather
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(group, distributed.ProcessGroup):
        size: int = distributed.get_world_size(group)

        def allgather(data: bytes) -> Sequence[bytes]:
            gathered: list[Any] = [None] * size
            distributed.all_gather_object(gathered, data, group=group)
            return gathered

        return distributed.get_rank(group), size, allgather
    raise WrongTypeError(
        "expected an mpi4py communicator or a torch.distributed process group, "
        f"got {type(group).__name__}"
    )


def _bootstrapped(
    rank: int,
    size: int,
    allgather: Callable[[bytes], Sequence[bytes]],
    deadline: float,
    num_nodes: int,
) -> Rank:
    failures: list[BaseException] = []

    def gather(_: int | None, send: int, receive: int, count: int) -> int:
        try:
            parts = allgather(ctypes.string_at(send, count))
            if len(parts) != size or any(len(part) != count for part in parts):
                raise InvalidArgumentError(
                    f"allgather must return {size} pieces of {count} bytes, one a rank"
                )
            ctypes.memmove(receive, b"".join(parts), count * size)
        except BaseException as error:  # noqa: BLE001: no exception may pass the C frames
            failures.append(error)
            return 1
        return 0

    b = _abi.Bootstrap()
    b.struct_size = ctypes.sizeof(b)
    b.rank, b.size, b.num_nodes = rank, size, num_nodes
    b.deadline_ns = int(deadline * 1e9)
    b.allgather = _abi.AllGather(gather)
    handle = c_void_p()
    status = _library.need("moekit_group_create_processes")(byref(b), byref(handle))
    if failures:
        raise failures[0]
    _library.check(status)
    return Rank(_Group(handle, size), rank)
