"""Ranks on two hosts of two ranks each, which share no memory: Open MPI starts the second host's through its remote agent and
carries messages between them over TCP. The hosts are namespaces of this machine (mpi_hosts.py); as root only."""

import threading
import time

import pytest

from moekit_program import FIXTURES, moekit
from mpi_hosts import Hosts, why_no_hosts
from mpi_ranks import MISSING as NO_MPI
from mpi_ranks import mpirun, over_mpi
from test_mpi_faults import MISSING as NO_FAULTS
from test_mpi_faults import PATIENT, SHORT, STATUS, expect_cases, expect_error, run_worlds, world

MODEL = FIXTURES / "qwen3moe-bf16-sharded"
MEMBERS = ["all2all", "push", "allgather", "low_latency", "hierarchical", "all2all_batched"]
TOKENS, HIDDEN = 13, 128

MISSING = NO_MPI or why_no_hosts()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")


@pytest.fixture(name="hosts")
def two_hosts(tmp_path):
    with Hosts(tmp_path) as hosts:
        yield hosts


@pytest.mark.parametrize("prepare", MEMBERS)
def test_bits_of_threads(tmp_path, hosts, prepare):
    for combine in ["slots", "rank_sums"]:
        verb = ["run", "--model", MODEL, "--random", TOKENS, "--prepare", prepare, "--combine", combine, "--repeat", 3]
        threads, processes = tmp_path / "threads.npy", tmp_path / "mpi.npy"
        assert moekit(*verb, "--ranks", 4, "--output", threads).returncode == 0
        before = hosts.bytes_sent()
        mpirun(tmp_path, 4, *verb, *over_mpi(4, "--output", processes), hosts=hosts).expect_done()
        assert processes.read_bytes() == threads.read_bytes(), combine
        # Some of each host's rows have an expert on the other one: they went over the cable.
        assert all(now - then > 3 * HIDDEN * 2 for now, then in zip(hosts.bytes_sent(), before))
        processes.unlink()


def test_tensor_parallel_ranks_and_microbatches(tmp_path, hosts):
    verb = ["profile", "--model", MODEL, "--random", TOKENS, "--tp", 2, "--microbatches", 2]
    threads, processes = tmp_path / "threads.npy", tmp_path / "mpi.npy"
    assert moekit(*verb, "--ranks", 4, "--output", threads).returncode == 0
    mpirun(tmp_path, 4, *verb, *over_mpi(4, "--output", processes, "--json"), hosts=hosts).expect_done()
    assert processes.read_bytes() == threads.read_bytes()


def test_a_cable_that_is_pulled(tmp_path, hosts):
    endless = ["run", "--model", MODEL, "--random", TOKENS, "--repeat", 10000000, "--log", tmp_path / "log"]
    launched = []
    job = threading.Thread(target=lambda: launched.append(
        mpirun(tmp_path, 4, *endless, *over_mpi(4, "--deadline", "5s"), hosts=hosts)))
    job.start()
    log = tmp_path / "log"
    while job.is_alive() and not (log.exists() and "making rank" in log.read_text()):
        time.sleep(0.1)
    time.sleep(0.5)
    hosts.pull_the_cable()
    job.join()
    [launched] = launched
    assert launched.status == ["7"] * 4, launched.stderr
    for rank, text in enumerate(launched.stderr):
        others = [2, 3] if rank < 2 else [0, 1]
        assert text.startswith(f"moekit: timeout: rank {rank}: "), text
        assert any(f"rank {r} (last seen in phase" in text for r in others), text


@pytest.mark.skipif(bool(NO_FAULTS), reason=NO_FAULTS or "-")
@pytest.mark.parametrize("prepare", ["all2all", "push"])
def test_a_fault_is_named_on_both_hosts(tmp_path, hosts, prepare):
    expect_cases(tmp_path, prepare, ranks=4, hosts=hosts)


@pytest.mark.skipif(bool(NO_FAULTS), reason=NO_FAULTS or "-")
def test_a_rank_that_dies_is_found_by_its_host(tmp_path, hosts):
    launched, [told] = run_worlds(tmp_path, [world("all2all", "dies", deadline_ms=5000)], ranks=4, hosts=hosts)
    assert launched.status[1] == "137" and told[1] is None
    for rank in (0, 2, 3):
        assert launched.status[rank] == STATUS["comm"], launched.stderr
