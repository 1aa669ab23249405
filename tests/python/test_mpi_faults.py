"""One rank under mpirun goes wrong, in a layer and at a step of a call: every other rank ends by itself with an error that
names it, and no row goes astray. tests/faults/mpi_rank.cc is the program; what it does to ranks that are threads and forked
processes, at every operation, is tests/faults/faults_test.cc."""

import json

import pytest

from moekit_program import PROGRAM
from mpi_ranks import MISSING, mpirun

RANK = PROGRAM.parent / "tests" / "mpi_rank"
if not MISSING and not RANK.exists():
    MISSING = f"{RANK} is missing: it is built with -DMOEKIT_FAULTS=ON"
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")

FAULTY = 1
COUNTING = ["all2all", "allgather", "hierarchical", "all2all_batched"]  # exchange counts before rows move
SIGNALLING = ["push", "low_latency"]
# Which errors end a program with which status.
STATUS = {"ok": "0", "invalid_argument": "2", "comm": "6", "timeout": "7"}
# Of worlds in which nobody waits in vain; the others wait for as long as rank 1 keeps them waiting.
PATIENT, SHORT = 60000, 800


def world(prepare, kind="none", step=0, deadline_ms=PATIENT, **more):
    return {"prepare": prepare, "kind": kind, "step": step, "deadline_ms": deadline_ms, **more}


def run_worlds(folder, worlds, ranks=3, nodes=0, hosts=None):
    """A launch, and for each world what the ranks say of it; None for one that died."""
    folder.mkdir(exist_ok=True)
    texts = [",".join(f"{key}={value}" for key, value in w.items()) for w in worlds]
    launched = mpirun(folder, ranks, folder, nodes, *texts, program=RANK, hosts=hosts)
    told = [(folder / f"outcome{r}").read_text().splitlines() for r in range(ranks)]
    return launched, [[json.loads(lines[w]) if w < len(lines) else None for lines in told] for w in range(len(worlds))]


def expect_error(rank, outcome, code, words, finished=1):
    assert outcome["wrong_row"] == "" and outcome["code"] == code, outcome
    assert outcome["error"].startswith(f"rank {rank}: "), outcome
    for word in words:
        assert word in outcome["error"], (word, outcome)
    # The fault is in call 1. What a rank has to wait for may come with the next call, and the news may find a slower rank
    # still in the one before.
    assert finished - 1 <= outcome["finished"] <= finished + 1, outcome


def expect_all(outcomes, code, words, faulty_too=True, finished=1):
    for rank, outcome in enumerate(outcomes):
        if rank != FAULTY or faulty_too:
            expect_error(rank, outcome, code, words, finished)


NAMED = [f"rank {FAULTY}", "layer 0, call 1"]


def expect_late(outcomes):
    for outcome in outcomes:
        assert outcome["fired"] and outcome["code"] == "ok" and outcome["finished"] == 3, outcome
        assert outcome["wrong_row"] == ""


def expect_stall(outcomes):
    expect_all(outcomes, "timeout", [f"rank {FAULTY} (last seen in phase ", "layer 0, call 1", "expected ", "seen "])


def expect_leaving(outcomes):
    assert outcomes[FAULTY]["gone"]
    for rank, outcome in enumerate(outcomes):
        if rank != FAULTY:
            word = {"timeout": "last seen in phase ", "comm": "left with an exchange in flight"}[outcome["code"]]
            expect_error(rank, outcome, outcome["code"], [*NAMED, word])


def expect_wrong_count(outcomes):
    expect_all(outcomes, "comm", [*NAMED, "counts disagree in phase ", " bytes to rank", "which expects", "nothing was moved"])


def expect_broken_promise(outcomes):
    expect_all(outcomes, "comm", NAMED)


def expect_flag_behind(outcomes):
    expect_all(outcomes, "timeout", [*NAMED, "heap flag "])


def expect_flag_ahead(outcomes):
    expect_all(outcomes, "comm", [*NAMED, "ranks disagree about the step", f"the flag of rank {FAULTY}", "is ahead: expected "])


def expect_another_plan(outcomes):
    for outcome in outcomes:  # all ranks have the same words, and no call
        assert outcome["code"] == "invalid_argument" and outcome["finished"] == 0, outcome
        assert outcome["error"].startswith(
            "the plans of ranks 0 and 1 differ in combine_dtype: rank 0 has f32, rank 1 has bf16"), outcome


def expect_a_skipped_call(outcomes):
    # The others' call 1 meets its call 2, and all rows come back to where they belong; then it has gone.
    for outcome in outcomes:
        assert outcome["finished"] == 2 and outcome["wrong_row"] == "", outcome
    expect_all(outcomes, "timeout", [f"rank {FAULTY} (last seen in phase ", "has left the group", "layer 0, call 2"], faulty_too=False, finished=2)


def cases_of(prepare):
    """(world, what all ranks say of it); the last ones are without an error. All kinds for a member of either sort."""
    if prepare not in ["all2all", "push"]:
        fault = [("sends_more", expect_wrong_count)] if prepare in COUNTING else [("flag_ahead", expect_flag_ahead)]
        cases = [(world(prepare, "stalls", 1, SHORT), expect_stall)]
        return cases + [(world(prepare, *kind), expect) for *kind, expect in [*fault, ("late", expect_late)]]
    cases = [(world(prepare, "stalls", step, SHORT), expect_stall) for step in range(3)]
    cases += [
        (world(prepare, "leaves", 1, SHORT), expect_leaving),
        (world(prepare, another_plan=1), expect_another_plan),
        (world(prepare, left_out=1, deadline_ms=2 * SHORT), expect_a_skipped_call),
    ]
    if prepare in COUNTING:
        cases += [(world(prepare, kind), expect_wrong_count) for kind in ["sends_more", "sends_less", "expects_more", "expects_less"]]
        cases += [(world(prepare, kind), expect_broken_promise) for kind in ["promises_more", "promises_less", "promises_absurd"]]
    else:
        cases += [(world(prepare, "flag_behind", deadline_ms=SHORT), expect_flag_behind)]
        cases += [(world(prepare, "flag_ahead"), expect_flag_ahead)]
    return cases + [(world(prepare, "late", step), expect_late) for step in range(3)]


def expect_cases(folder, prepare, **where):
    cases = cases_of(prepare)
    launched, told = run_worlds(folder, [w for w, _ in cases], **where)
    for (this, expect), outcomes in zip(cases, told):
        assert None not in outcomes, (this, launched.stderr)
        try:
            expect(outcomes)
        except AssertionError as error:
            raise AssertionError(f"{this}: {json.dumps(outcomes, indent=1)}") from error


# Ranks of one node meet in shared memory, whatever the launcher; of three, by messages only.
@pytest.mark.parametrize("prepare, nodes", [("all2all", 1), ("push", 1), *((p, 3) for p in COUNTING + SIGNALLING)])
def test_a_fault_is_named_and_the_next_group_works(tmp_path, prepare, nodes):
    expect_cases(tmp_path, prepare, nodes=nodes)


@pytest.mark.parametrize("nodes", [1, 3])
def test_every_rank_ends_with_a_status_of_its_own(tmp_path, nodes):
    for i, (this, code) in enumerate([
            (world("push", "stalls", deadline_ms=SHORT), "timeout"),
            (world("all2all", "sends_more"), "comm"),
            (world("all2all", another_plan=1), "invalid_argument"),
            (world("push", "late"), "ok"),
    ]):
        launched, [told] = run_worlds(tmp_path / str(i), [this], nodes=nodes)
        assert [outcome["code"] for outcome in told] == [code] * 3, told
        assert launched.status == [STATUS[code]] * 3, launched.stderr


@pytest.mark.parametrize("prepare, step", [("all2all", 0), ("push", 1), ("hierarchical", 2)])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_rank_that_dies(tmp_path, prepare, step, nodes):
    # Its node finds its process gone at once; other nodes wait for it.
    code = "comm" if nodes == 1 else "timeout"
    launched, [told] = run_worlds(tmp_path, [world(prepare, "dies", step, PATIENT if nodes == 1 else SHORT)], nodes=nodes)
    assert told[FAULTY] is None
    assert launched.status == [STATUS[code], "137", STATUS[code]], launched.stderr
    for rank in (0, 2):
        expect_error(rank, told[rank], code, [f"rank {FAULTY} (last seen in phase ", "layer 0, call 1"])
