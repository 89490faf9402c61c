"""Rules on state: the residency table, and calls that must change nothing."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from rl_interfaces.residency import Residency, ResidencyError
from rl_interfaces.testing.expectations import (
    expect,
    expect_close,
    expect_error,
    expect_tensors,
    expect_unlike,
)
from rl_interfaces.testing.report import rule
from rl_interfaces.testing.worker.bench import NUM_CALLS, WorkerBench
from rl_interfaces.testing.worker.oracle import LogprobLoss, is_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_interfaces.testing.worker.bench import TrainResult
    from rl_interfaces.testing.worker.case import Worker
    from rl_interfaces.testing.worker.oracle import Batch


@rule()
def scoring_and_sampling_leave_no_trace(bench: WorkerBench) -> None:
    """Scoring and sampling change neither random state nor weights nor the next step."""
    mine = bench.share(bench.scoring)

    def act(worker: Worker) -> None:
        for call in bench.scoring_calls(worker).values():
            call(mine)

    _expect_no_trace(bench, act)
    with _reward_worker(bench) as worker:
        if worker is not None:
            _expect_random_state_kept(lambda: worker.score(mine))


@rule()
def evaluating_leaves_no_trace(bench: WorkerBench) -> None:
    """`eval_mode` changes neither random state nor weights nor the next step."""
    _expect_no_trace(bench, lambda worker: bench.train(worker, eval_mode=True))


@rule()
def batches_are_not_written_into(bench: WorkerBench) -> None:
    """No call changes its batch."""
    size = bench.global_batch_size

    def hold(call: Callable[..., object], what: str, *, batch_size: int | None = None) -> None:
        mine = bench.share(bench.training, batch_size=batch_size)
        before = {key: value.clone() for key, value in _tensors(mine).items()}
        call(mine)
        after = _tensors(mine)
        expect(after.keys() == before.keys(), f"{what} has changed the keys of its batch")
        for key, value in before.items():
            expect(torch.equal(after[key], value), f"{what} has written into {key!r}")

    with bench.fresh() as worker:
        for name, call in bench.scoring_calls(worker).items():
            hold(call, name)

        def train(mine: Batch) -> None:
            worker.train(mine, LogprobLoss(), gbs=size)

        hold(train, "train", batch_size=size)
    with _reward_worker(bench) as worker:
        if worker is not None:
            hold(worker.score, "score")


@contextmanager
def _reward_worker(bench: WorkerBench) -> Iterator[Worker]:
    """Run the body with a reward worker, or None if the case has none."""
    reward = bench.case.reward
    if reward is None or not hasattr(bench.worker_type, "score"):
        yield None
        return
    options: dict[str, object] = {"init_optimizer": False, "init_reference_model": False}
    with bench.fresh(reward.settings, **options) as worker:
        yield worker


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}


def _expect_random_state_kept(act: Callable[[], object]) -> None:
    """Call `act` and raise if it changed the state of one of torch's global generators."""
    before = _random_states()
    act()
    after = _random_states()
    kept = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    expect(all(kept), "the random state has moved")


def _random_states() -> list[torch.Tensor]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpus]


def _expect_no_trace(bench: WorkerBench, act: Callable[..., object]) -> None:
    mine = bench.share(bench.scoring)
    repeat = bench.tolerances.repeat
    with bench.fresh() as worker:
        before = worker.get_logprobs(mine)["logprobs"].clone()
        _expect_random_state_kept(lambda: act(worker))
        after = worker.get_logprobs(mine)["logprobs"]
        result = bench.train(worker)
    expect_close(after, before, "get_logprobs", atol=repeat)
    first = bench.trained.results[0]
    bench.expect_results(result, first, what=" of the step that follows", atol=repeat)


MOVES = (
    "prepare_for_training",
    "prepare_for_lp_inference",
    "offload_before_refit",
    "offload_after_refit",
)


def _calls(bench: WorkerBench, worker: Worker) -> dict[str, Callable[[], object]]:
    """Return the calls of the residency table that the worker has, by name."""
    mine = bench.share(bench.scoring)
    calls: dict[str, Callable[[], object]] = {
        "train": lambda: bench.train(worker),
        "train(eval_mode=True)": lambda: bench.train(worker, eval_mode=True),
        **{name: partial(call, mine) for name, call in bench.scoring_calls(worker).items()},
    }
    if hasattr(worker, "forward_backward"):

        def forward_backward() -> None:
            worker.forward_backward(bench.share(bench.training), LogprobLoss())
            # Pending gradients would refuse the moves.
            worker.zero_grad()

        calls["forward_backward"] = forward_backward
    if hasattr(worker, "prepare_weights_for_ipc"):
        calls["send_weights"] = worker.prepare_weights_for_ipc
    return calls


def _refusal(residency: Residency, call: str) -> str | None:
    """Return the error of the residency table for `call`, None if it is allowed."""
    try:
        residency.require(call)
    except ResidencyError as error:
        return str(error)
    return None


@rule()
def a_state_allows_what_the_table_allows(bench: WorkerBench) -> None:
    """In each state the allowed calls succeed, and saves and loads succeed in every state."""
    mine, saved = bench.share(bench.scoring), bench.saved
    paths = {move: bench.path("weights") for move in (None, *MOVES)}
    found: dict[str, torch.Tensor] = {}
    with bench.fresh() as worker:
        residency = Residency(has_optimizer=True)
        for move in (None, *MOVES):
            if move is not None:
                getattr(worker, move)()
                residency.enter(move)
            for name, call in _calls(bench, worker).items():
                if _refusal(residency, name) is None:
                    call()
            worker.save_checkpoint(paths[move])
            worker.get_gpu_info()
        worker.prepare_for_lp_inference()
        expected = worker.get_logprobs(mine)["logprobs"].clone()
        for move in MOVES:
            worker.load_checkpoint(saved.weights)
            getattr(worker, move)()
            worker.load_checkpoint(paths[move])
            worker.prepare_for_lp_inference()
            found[move] = worker.get_logprobs(mine)["logprobs"].clone()
    for move, logprobs in found.items():
        what = f"get_logprobs of what is saved and loaded after {move}()"
        expect_close(logprobs, expected, what, atol=bench.tolerances.repeat)
    if is_target(mine).any():
        expect_unlike(saved.logprobs, expected, "the log-probabilities of both saves")


@rule()
def a_state_refuses_what_the_table_refuses(bench: WorkerBench) -> None:
    """Calls that are not allowed raise `ResidencyError` with the state and the way out."""
    num_refused = 0
    with bench.fresh() as worker:
        residency = Residency(has_optimizer=True)
        for move in MOVES:
            getattr(worker, move)()
            state = residency.enter(move).value
            for name, call in _calls(bench, worker).items():
                refusal = _refusal(residency, name)
                if refusal is not None:
                    ways = tuple(way for way in MOVES if f"{way}()" in refusal)
                    what = f"{name} while the worker is {state!r}"
                    expect_error(call, ResidencyError, words=(repr(state), *ways), what=what)
                    num_refused += 1
    expect(num_refused >= 5, f"the table has refused {num_refused} calls alone")


@rule()
def a_worker_without_an_optimizer_starts_in_inference(bench: WorkerBench) -> None:
    """Without an optimizer the first state is `inference`: it scores, and does not train."""
    with bench.fresh(init_optimizer=False, init_reference_model=False) as worker:
        worker.get_logprobs(bench.share(bench.scoring))
        expect_error(
            lambda: bench.train(worker),
            ResidencyError,
            words=("'inference'",),
            what="train without an optimizer",
        )


@rule()
def offloading_and_reloading_change_nothing(bench: WorkerBench) -> None:
    """Passing through every state between steps does not change a run."""
    mine, repeat = bench.share(bench.scoring), bench.tolerances.repeat
    results: list[TrainResult] = []
    with bench.fresh(init_reference_model=False) as worker:
        results.append(bench.train(worker))
        before = worker.get_logprobs(mine)["logprobs"].clone()
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_lp_inference()
        after = worker.get_logprobs(mine)["logprobs"].clone()
        worker.prepare_for_training()
        results.append(bench.train(worker))
        for move in ("offload_before_refit", "offload_after_refit"):
            getattr(worker, move)()
            worker.prepare_for_training()
        results += [bench.train(worker) for _ in range(2, NUM_CALLS)]
        parameters = bench.exported(worker)
    expect_close(after, before, "get_logprobs after offloading", atol=repeat)
    for found, expected in zip(results, bench.trained.results, strict=True):
        bench.expect_results(found, expected, atol=repeat)
    expect_tensors(parameters, bench.trained.parameters, "parameters", atol=repeat)
