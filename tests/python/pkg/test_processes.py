"""Ranks that are processes, bootstrapped by what the test has: pipes, or torch.distributed."""

import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys

import moekit
import numpy as np
import pytest
from weights import H, K, rows, weights

pytestmark = pytest.mark.skipif(
    not hasattr(moekit._library.lib, "moekit_group_create_processes"), reason="this libmoekit has threads as ranks only"
)


def make(rank=None):
    gate_up, down, router = weights()
    return moekit.MoELayer(
        gate_up=gate_up, down=down, router_weight=router, top_k=K, rank=rank, num_threads=1, max_tokens=9)


def run_rank(index, size, pipes, results):
    """allgather over pipes to rank 0."""

    def allgather(data):
        if index == 0:
            parts = [data, *(pipe.recv_bytes() for pipe in pipes)]
            for pipe in pipes:
                for part in parts:
                    pipe.send_bytes(part)
            return parts
        pipes[0].send_bytes(data)
        return [pipes[0].recv_bytes() for _ in range(size)]

    layer = make(moekit.process_rank(rank=index, size=size, allgather=allgather, deadline=20))
    results.put((index, layer(np.array_split(rows(9), size)[index])))


@pytest.mark.parametrize("size", [1, 3])
def test_processes_give_the_bits_of_one(size):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ends = [context.Pipe() for _ in range(size - 1)]
    processes = [
        context.Process(target=run_rank, args=(r, size, [e[0] for e in ends] if r == 0 else [ends[r - 1][1]], results))
        for r in range(size)
    ]
    for process in processes:
        process.start()
    parts = dict(results.get(timeout=60) for _ in range(size))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    np.testing.assert_array_equal(np.concatenate([parts[r] for r in range(size)]), make()(rows(9)))


def test_errors_of_a_bootstrap():
    def fails(data):
        raise OSError("the network is gone")

    with pytest.raises(OSError, match="network is gone"):
        moekit.process_rank(rank=0, size=2, allgather=fails, deadline=1)
    with pytest.raises(moekit.InvalidArgumentError, match="pieces"):
        moekit.process_rank(rank=0, size=2, allgather=lambda data: [data], deadline=1)
    with pytest.raises(moekit.InvalidArgumentError, match="expected a group"):
        moekit.process_rank(rank=0, size=2)
    with pytest.raises(TypeError, match="mpi4py"):
        moekit.process_rank(object())
    with pytest.raises(moekit.InvalidArgumentError, match="mpi4py"):
        moekit.process_rank(transport="mpi")


def run_torch_rank(index, size, folder, results):
    import torch
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=size)
    layer = make(moekit.process_rank(distributed.group.WORLD))
    part = layer(torch.from_numpy(np.array_split(rows(9), size)[index].copy()))
    results.put((index, part.numpy()))
    distributed.barrier()
    distributed.destroy_process_group()


def test_torch_process_group(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed part")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=run_torch_rank, args=(r, 2, os.fspath(tmp_path), results)) for r in range(2)]
    for process in processes:
        process.start()
    parts = dict(results.get(timeout=120) for _ in range(2))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    wanted = make()(rows(9))
    np.testing.assert_array_equal(np.concatenate([parts[0], parts[1]]), wanted)
    assert wanted.shape == (9, H)


# A program of its own, as mpirun starts it: its part of the rows against those of one rank.
MPI_RANK = """
import sys
sys.path[:0] = sys.argv[2:]
from mpi4py import MPI
import numpy as np
import moekit
from test_processes import make
from weights import rows

comm = MPI.COMM_WORLD
layer = make(moekit.process_rank(comm, transport=sys.argv[1], deadline=30))
part = layer(np.array_split(rows(9), comm.size)[comm.rank])
parts = comm.gather(part)
if comm.rank == 0:
    np.testing.assert_array_equal(np.concatenate(parts), make()(rows(9)))
    print("the same bits on", comm.size)
"""


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_mpi4py_communicator(transport, tmp_path):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed")
    (tmp_path / "rank.py").write_text(MPI_RANK)
    folders = [str(pathlib.Path(__file__).parent), *(p for p in sys.path if p)]
    command = [mpirun, "-n", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, str(tmp_path / "rank.py"),
               transport, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    if transport == "mpi" and "libmoekit_mpi.so" in done.stderr:
        pytest.skip("this wheel has no MPI plug-in")
    assert done.returncode == 0, done.stderr
    assert "the same bits on 2" in done.stdout
