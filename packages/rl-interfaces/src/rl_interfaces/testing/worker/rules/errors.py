"""What a user gets wrong is said in words: a ValueError with the key and the numbers."""

from __future__ import annotations

from rl_interfaces.testing.expectations import expect_error
from rl_interfaces.testing.report import rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.inputs import LogprobLoss


@rule()
def unknown_keys_are_named(bench: WorkerBench) -> None:
    """A key that nobody knows is refused before anything starts."""
    config = {**bench.case.config, "learning_rat": 1.0}
    expect_error(
        lambda: bench.worker_class.validate_config(config, world_size=bench.ranks.world_size),
        ValueError,
        words=("learning_rat",),
        what="the key 'learning_rat'",
    )


@rule()
def sizes_that_cannot_be_are_named(bench: WorkerBench) -> None:
    """Sizes that are not positive, or that the ranks do not divide, are refused with numbers."""
    worker, ranks = bench.worker, bench.layout.data_parallel
    batch = bench.share(bench.scoring)
    for name, value in (("gbs", -1), ("mbs", -2), ("gbs", 0), ("mbs", 0)):
        expect_error(
            lambda name=name, value=value: worker.train(batch, LogprobLoss(), **{name: value}),
            ValueError,
            words=(name, str(value)),
            what=f"{name}={value}",
        )
    if ranks > 1:
        expect_error(
            lambda: worker.train(batch, LogprobLoss(), gbs=ranks + 1),
            ValueError,
            words=("gbs", str(ranks + 1), str(ranks)),
            what=f"gbs={ranks + 1} over {ranks} data-parallel ranks",
        )


@rule()
def missing_keys_are_named(bench: WorkerBench) -> None:
    """A batch that lacks a key is refused with the key's name."""
    worker = bench.worker
    for key in ("input_ids", "input_lengths", "sample_mask", "token_mask"):
        batch = bench.share(bench.scoring)
        del batch[key]
        expect_error(
            lambda batch=batch: worker.train(batch, LogprobLoss()),
            ValueError,
            words=(key,),
            what=f"a batch without {key!r}",
        )


@rule()
def left_padding_is_refused(bench: WorkerBench) -> None:
    """Rows that are padded on the left are refused, and not scored as if they were not."""
    # No row fills the width: a rank that has it alone would see nothing that is wrong.
    columns = bench.columns(bench.on_every_rank([5, 3, 4, 2, 5, 3]), width=6)
    rows = columns["input_ids"]
    expect_error(
        lambda: bench.worker.get_logprobs(bench.share({**columns, "input_ids": rows.flip(1)})),
        ValueError,
        words=("input_ids",),
        what="left padding",
    )
