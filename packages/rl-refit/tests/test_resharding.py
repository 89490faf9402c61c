"""Resharding over real gloo ranks, against the same model on one process."""

import gc

import pytest
import resharding_ranks
import torch
import torch.multiprocessing as mp
from patience import PATIENCE_S


def run(tmp_path, world, *, fails=False, **case):
    """Return what each rank has seen; None of one that has left nothing."""
    results = str(tmp_path / "seen")
    # What other tests have left in cycles, such as a group in a traceback, must not be collected in
    # a fork, which has no threads that would end it.
    gc.collect()
    gc.freeze()
    # Forked, as each spawned process imports torch, which takes longer than the test.
    context = mp.start_processes(
        resharding_ranks.run,
        (world, tmp_path / "store", case, results),
        nprocs=world,
        join=not fails,
        start_method="fork",
    )
    gc.unfreeze()
    if fails:
        for process in context.processes:
            process.join(PATIENCE_S)
            assert process.exitcode is not None
    seen = []
    for rank in range(world):
        path = tmp_path / f"seen-{rank}"
        seen.append(torch.load(path, weights_only=False) if path.exists() else None)
    return seen


@pytest.mark.parametrize(
    ("fsdp", "tp", "engine_tp", "engines", "dtype"),
    [
        (2, 1, 1, 1, torch.float32),
        (2, 2, 2, 2, torch.bfloat16),
        pytest.param(1, 2, 4, 4, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(3, 1, 1, 2, torch.float32, marks=pytest.mark.slow),
        pytest.param(2, 1, 4, 4, torch.float32, marks=pytest.mark.slow),
    ],
)
@pytest.mark.promise_first(1)
def test_engines_get_their_slices_and_no_more(tmp_path, fsdp, tp, engine_tp, engines, dtype):
    trainers = fsdp * tp
    seen = run(
        tmp_path,
        trainers + engines,
        kind="refit",
        fsdp=fsdp,
        tp=tp,
        engine_tp=engine_tp,
        dtype=dtype,
    )
    expected = resharding_ranks.build().state_dict()
    for rank, each in enumerate(seen):
        assert "error" not in each, each["trace"]
        assert each["version"] == 3
        assert each["rounds"] > 1
        for report in each["reports"]:
            assert report.bytes_received <= each["ideal"]
            assert report.bytes_full == each["ideal"] or rank < trainers
            assert report.peak_bytes <= resharding_ranks.ROUND_BYTES * 2
        full, _, delta = each["reports"]
        assert full.bytes_received == each["ideal"]
        assert delta.bytes_received + delta.bytes_sent < full.bytes_full / 2
        # Beside messages: counts of the agreement, products of the digests, 8 bytes for 2, and
        # the copies of shards, made once.
        assert each["largest"] <= 8 * resharding_ranks.ROUND_BYTES
        assert bool(each["got"]) == (rank >= trainers)
        for name, box, data in each["got"]:
            full = expected[name] * (2 if expected[name].is_floating_point() else 1)
            full.view(-1)[0] = resharding_ranks.FIRST
            assert torch.equal(data, box.view_of(full).to(data.dtype)), name
    sent = sum(each["reports"][0].bytes_sent for each in seen)
    assert sent == sum(each["ideal"] for each in seen)


@pytest.mark.parametrize("kind", ["corrupt", "misplace"])
def test_what_arrives_wrong_fails_the_refit_on_every_rank(tmp_path, kind):
    case = {"fsdp": 2, "tp": 1, "engine_tp": 1, "dtype": torch.bfloat16, "victim": 2}
    seen = run(tmp_path, 3, kind=kind, **case)
    for each in seen:
        assert each["error"].startswith("VerificationError: "), each
        assert "rank 2" in each["error"], each
        assert each["ready"] == "PoisonedError"
    assert "digest of what rank 2 holds of" in seen[2]["error"]


@pytest.mark.parametrize(("how", "victim"), [("exit", 1), ("silent", 0)])
def test_a_dead_peer_ends_the_wait(tmp_path, how, victim):
    case = {"fsdp": 2, "tp": 1, "engine_tp": 1, "dtype": torch.float32, "victim": victim}
    seen = run(tmp_path, 3, fails=True, kind="die", how=how, limit_s=4.0, **case)
    for rank, each in enumerate(seen):
        if rank == victim:
            continue
        assert each["error"].startswith(("MemberLostError", "RefitTimeoutError")), each
        assert each["ready"] == "PoisonedError"
    assert f"rank {victim}" in seen[2]["error"]


def test_a_slice_that_is_wanted_twice_arrives_in_both_places(tmp_path):
    for each in run(tmp_path, 2, kind="twice"):
        assert "error" not in each, each["trace"]


def test_ranks_with_different_versions_fail_the_refit(tmp_path):
    case = {"fsdp": 1, "tp": 1, "engine_tp": 1, "dtype": torch.float32}
    for each in run(tmp_path, 2, kind="versions", **case):
        assert each["first"] == "ranks transfer different versions, from 1 to 2"
        assert "make a new group" in each["again"]


def test_trainers_follow_the_first_one(tmp_path):
    for rank, each in enumerate(run(tmp_path, 3, kind="follow")):
        assert "error" not in each, each["trace"]
        # Before there is an engine, no trainer waits for longer than the first one does.
        expected = ["of 1 receivers", "before the exchange", None][rank]
        if expected:
            assert expected in each["alone"], each
        assert each["sent"] == [1, 2]
