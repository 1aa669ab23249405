"""Ranks that are processes under mpirun: the bits of threads, one printer, and an exit status of each rank's own."""

import json
import os

import pytest

from moekit_program import FIXTURES, moekit
from mpi_ranks import MISSING, mpirun, over_mpi

MODEL = FIXTURES / "qwen3moe-bf16-sharded"
SMALL = "E=8,k=2,H=64,I=32,act=silu,weights=bf16"

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")


@pytest.mark.parametrize("combine", ["slots", "rank_sums"])
@pytest.mark.parametrize("ranks, nodes", [(2, None), (3, 2), (4, None), (4, 2), (4, 4)])
def test_bits_of_threads(tmp_path, ranks, nodes, combine):
    verb = ["run", "--model", MODEL, "--random", 13, "--seed", 5, "--combine", combine]
    threads, processes = tmp_path / "threads.safetensors", tmp_path / "mpi.safetensors"
    done = moekit(*verb, "--ranks", ranks, "--output", threads)
    assert done.returncode == 0, done.stderr
    faked = [] if nodes is None else ["--nodes", nodes]
    launched = mpirun(tmp_path, ranks, *verb, *over_mpi(ranks, "--output", processes, "--json", *faked))
    launched.expect_done()
    assert processes.read_bytes() == threads.read_bytes()
    report = json.loads(launched.stdout)  # one line: rank 0 alone prints
    assert report["transport"] == "mpi" and report["ranks"] == ranks


@pytest.mark.parametrize("prepare", ["all2all", "push", "allgather", "low_latency"])
def test_every_prepare(tmp_path, prepare):
    verb = ["run", "--model", MODEL, "--random", 13, "--prepare", prepare, "--repeat", 5]
    threads, processes = tmp_path / "threads.npy", tmp_path / "mpi.npy"
    assert moekit(*verb, "--ranks", 4, "--output", threads).returncode == 0
    for nodes in (1, 2):
        mpirun(tmp_path, 4, *verb, *over_mpi(4, "--nodes", nodes, "--output", processes)).expect_done()
        assert processes.read_bytes() == threads.read_bytes()
        processes.unlink()


def test_tensor_parallel_ranks_and_microbatches(tmp_path):
    verb = ["profile", "--model", MODEL, "--random", 13, "--tp", 2, "--microbatches", 2]
    threads, processes = tmp_path / "threads.npy", tmp_path / "mpi.npy"
    assert moekit(*verb, "--ranks", 4, "--output", threads).returncode == 0
    launched = mpirun(tmp_path, 4, *verb, *over_mpi(4, "--nodes", 2, "--output", processes, "--json"))
    launched.expect_done()
    assert processes.read_bytes() == threads.read_bytes()


def test_a_placement_that_changes(tmp_path):
    verb = ["run", "--model", MODEL, "--random", 29, "--slots-per-rank", 4, "--rebalance", "greedy"]
    threads, processes = tmp_path / "threads.npy", tmp_path / "mpi.npy"
    saved = [tmp_path / "threads.json", tmp_path / "mpi.json"]
    done = moekit(*verb, "--ranks", 4, "--output", threads, "--save-placement", saved[0], "--json")
    assert done.returncode == 0, done.stderr
    launched = mpirun(tmp_path, 4, *verb,
                      *over_mpi(4, "--nodes", 2, "--output", processes, "--save-placement", saved[1], "--json"))
    launched.expect_done()
    assert processes.read_bytes() == threads.read_bytes()
    assert saved[1].read_text() == saved[0].read_text()
    one, other = json.loads(done.stdout), json.loads(launched.stdout)
    assert other["load"] == one["load"] and other["rebalanced"] == one["rebalanced"]


def test_sixteen_processes(tmp_path):
    verb = ["run", "--model", MODEL, "--random", 40, "--repeat", 3]
    threads, processes = tmp_path / "threads.npy", tmp_path / "mpi.npy"
    assert moekit(*verb, "--ranks", 16, "--output", threads).returncode == 0
    for more in [[], ["--nodes", 4]]:
        mpirun(tmp_path, 16, *verb, *over_mpi(16, "--output", processes, "--threads", 1, *more)).expect_done()
        assert processes.read_bytes() == threads.read_bytes()


def test_profile_has_the_spans_of_all_processes(tmp_path):
    path = tmp_path / "trace.json"
    args = ["profile", "--model", MODEL, "--random", 12, "--ranks", 3, "--transport", "mpi", "--microbatches", 2]
    done = mpirun(tmp_path, 3, *args, "--trace", path, "--json")
    done.expect_done()
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(3):
        mine = [e for e in events if e["pid"] == rank]
        assert {"route", "dispatch send", "experts", "combine receive"} <= {e["name"] for e in mine if e["ph"] == "X"}
        assert {e["args"]["microbatch"] for e in mine if e["ph"] == "X"} == {0, 1}
        assert sum(e["ph"] == "b" for e in mine) == sum(e["ph"] == "e" for e in mine) == 2 * 2
    sent = [e["args"] for e in events if e["name"] == "combine send"]
    assert sum(a["rows"] for a in sent) == 12 * 3
    stages = {s["stage"]: s for s in json.loads(done.stdout)["stages"]}
    assert stages["experts"]["spans"] == 3 * 2


def test_combos_and_the_exchange(tmp_path):
    args = ["combos", "--problem", SMALL + ",tokens=3,routing=holes", "--ranks", 2, "--wire", "auto", "--combine",
            "slots", "--combine-dtype", "f32", "--experts", "cpu"]
    done = mpirun(tmp_path, 2, *args, "--transport", "mpi", "--json")
    done.expect_done()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    threads = [json.loads(line) for line in moekit(*args, "--json").stdout.splitlines()]
    assert [(x["prepare"], x["verdict"], x["rel_rms"]) for x in lines] == [
        (x["prepare"], x["verdict"], x["rel_rms"]) for x in threads]
    assert {x["prepare"] for x in lines if x["verdict"] == "passed"} >= {"all2all", "push", "allgather"}
    args = ["bench", "--problem", SMALL, "--tokens-list", "5", "--min-time", "0.01", "--ranks", 2, "--exchange-only"]
    done = mpirun(tmp_path, 2, *args, "--transport", "mpi", "--json")
    done.expect_done()
    exchange = json.loads(done.stdout.splitlines()[1])["exchange"]
    same = json.loads(moekit(*args, "--json").stdout.splitlines()[1])["exchange"]
    assert exchange["bytes"] == same["bytes"] and exchange["own_bytes"] == same["own_bytes"]


def test_check_explain_and_bench(tmp_path):
    checked = mpirun(tmp_path, 2, "check", "--model", MODEL, *over_mpi(2, "--json"))
    checked.expect_done()
    assert any(json.loads(line)["passed"] for line in checked.stdout.splitlines())
    explained = mpirun(tmp_path, 2, "explain", "--problem", SMALL, *over_mpi(2, "--json"))
    explained.expect_done()
    assert json.loads(explained.stdout)["chosen"]
    timed = mpirun(tmp_path, 2, "bench", "--problem", SMALL, "--tokens-list", "4", "--min-time", "0.05",
                   *over_mpi(2, "--json"))
    timed.expect_done()
    point = json.loads(timed.stdout.splitlines()[1])
    assert point["ranks"] == 2 and point["time_us"]["median"] > 0 and point["bytes"]["wire"] > 0


def test_ranks_must_be_the_processes(tmp_path):
    launched = mpirun(tmp_path, 2, "run", "--model", MODEL, *over_mpi(3))
    assert launched.status == ["2", "2"] and launched.stdout == ""
    for rank, text in enumerate(launched.stderr):
        assert f"moekit: invalid_argument: rank {rank}: --ranks" in text


def test_combos_over_processes_need_a_number_of_ranks(tmp_path):
    launched = mpirun(tmp_path, 2, "combos", "--transport", "mpi")
    assert launched.status == ["2", "2"] and launched.stdout == ""


def test_one_rank_without_mpirun():
    done = moekit("run", "--model", MODEL, "--transport", "mpi", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 1


def test_without_the_plug_in(tmp_path):
    done = moekit("run", "--model", MODEL, "--transport", "mpi",
                  env={**os.environ, "MOEKIT_MPI_PLUGIN": str(tmp_path / "none.so")})
    assert done.returncode == 3 and "libopenmpi-dev" in done.stderr


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_rank_that_gives_up_is_heard(tmp_path, nodes):
    launched = mpirun(tmp_path, 3, "run", "--model", MODEL, *over_mpi(3, "--nodes", nodes),
                      RANK1_ARGS=f"run --model /nowhere --ranks 3 --transport mpi --nodes {nodes}")
    assert launched.status == ["6", "2", "6"], launched.stderr
    assert "rank 1: " in launched.stderr[1] and "/nowhere" in launched.stderr[1]
    for rank in (0, 2):
        assert f"moekit: comm: rank {rank}: rank 1 gave up" in launched.stderr[rank]
        assert "/nowhere" in launched.stderr[rank]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("attempt", range(10))
def test_plans_that_differ_are_refused_on_all_ranks_alike(tmp_path, nodes, attempt):
    args = ["run", "--model", MODEL, *over_mpi(3, "--nodes", nodes)]
    launched = mpirun(tmp_path, 3, *args,
                      RANK2_ARGS=" ".join(map(str, args)) + " --combine-dtype bf16")
    assert launched.status == ["2", "2", "2"], launched.stderr
    for rank, text in enumerate(launched.stderr):
        assert text.startswith(f"moekit: invalid_argument: rank {rank}: the plans of ranks 0 and 2 differ in "
                               "combine_dtype: rank 0 has f32, rank 2 has bf16"), text


@pytest.mark.parametrize("prepare", ["all2all", "push"])
@pytest.mark.parametrize("attempt", range(10))
def test_a_full_capacity_is_refused_on_all_ranks_alike(tmp_path, prepare, attempt):
    launched = mpirun(tmp_path, 3, "run", "--model", MODEL, "--random", 30, "--capacity", "refuse:3",
                      "--prepare", prepare, *over_mpi(3))
    assert launched.status == ["2", "2", "2"], launched.stderr
    for rank, text in enumerate(launched.stderr):
        assert text.startswith(f"moekit: invalid_argument: rank {rank}: ") and "the policy is to refuse" in text


ENDLESS = ["run", "--model", MODEL, "--repeat", 10000000]


@pytest.mark.parametrize("nodes, strike, status",
                         [(1, "KILL", "6"), (3, "KILL", "7"), (1, "STOP", "7"), (2, "STOP", "7")])
def test_a_rank_that_dies_or_stops_is_named(tmp_path, nodes, strike, status):
    launched = mpirun(tmp_path, 3, *ENDLESS, *over_mpi(3, "--nodes", nodes, "--deadline", "5s"), STRIKE1=strike)
    assert launched.status == [status, "struck", status], launched.stderr
    kind = {"6": "comm", "7": "timeout"}[status]
    for rank in (0, 2):
        assert launched.stderr[rank].startswith(f"moekit: {kind}: rank {rank}: ")
        assert "rank 1 (last seen in phase" in launched.stderr[rank]


def test_combos_end_with_a_lost_group(tmp_path):
    args = ["combos", "--full", "--prepare", "push", "--experts", "cpu"]
    launched = mpirun(tmp_path, 3, *args, *over_mpi(3, "--deadline", "5s"), STRIKE1="KILL")
    assert launched.status == ["6", "struck", "6"], launched.stderr
    for rank in (0, 2):
        assert launched.stderr[rank].startswith("moekit: comm: "), launched.stderr
        assert "rank 1" in launched.stderr[rank]
    assert " failed" not in launched.stdout


def test_a_rank_that_never_calls(tmp_path):
    launched = mpirun(tmp_path, 2, "run", "--model", MODEL, *over_mpi(2, "--deadline", "3s"), RANK1_ARGS="--version")
    assert launched.status == ["7", "0"], launched.stderr
    assert launched.stderr[0].startswith("moekit: timeout: MPI_Init did not end within 3000 ms: "
                                         "rank 0 expected 2 ranks, seen 1: rank 1 has not come; "), launched.stderr


def test_a_rank_that_never_joins(tmp_path):
    launched = mpirun(tmp_path, 2, "run", "--model", MODEL, *over_mpi(2, "--deadline", "3s"),
                      RANK1_ARGS="run --model /nowhere --ranks 5 --transport mpi")
    assert launched.status == ["7", "2"], launched.stderr
    assert launched.stderr[0].startswith("moekit: timeout: rank 0: "), launched.stderr
    assert "rank 0 expected 2 ranks, seen 1: rank 1 has ended (process " in launched.stderr[0], launched.stderr
