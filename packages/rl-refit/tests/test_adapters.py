"""Adapters apart from their base: what is sent, what asks for the base, and what is refused."""

import pytest
import torch
from patience import PATIENCE_S
from refit_pairs import Engine, must, outcomes
from rl_refit import PoisonedError, RefitError, RefitSender, TensorSource
from rl_refit.adapters import DOWN, UP
from rl_refit.plan import ALIGNMENT, RefitPlan

TRANSPORTS = ("shm", "golden", "collective", "chain")
RANK = 2
LAYERS = [f"model.layers.{index}.mlp.{end}" for index in range(4) for end in ("up", "down")]


def some_base(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = {f"{layer}.weight": (64, 48) for layer in LAYERS}
    sizes = {"embed.weight": (70, 48), **sizes, "model.norm.weight": (48,)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def some_adapters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = {}
    for layer in LAYERS:
        sizes |= {layer + DOWN: (RANK, 48), layer + UP: (64, RANK)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


class Pair:
    """A sender with adapters and its engines, which hold what was loaded last by name."""

    def __init__(self, transport="shm", num_receivers=1, **options):
        self.base, self.adapters = some_base(), some_adapters()
        self.sender = RefitSender(
            TensorSource(self.base),
            transport,
            num_receivers,
            adapters=TensorSource(self.adapters),
            **{"bucket_bytes": 16 << 10, "timeout_s": PATIENCE_S, **options},
        )
        self.engines = [Engine(self.sender.address, rank) for rank in range(num_receivers)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for engine in self.engines:
            engine.receiver.close()
        self.sender.close()

    def change(self, seed):
        for name, tensor in some_adapters(seed).items():
            self.adapters[name].copy_(tensor)

    def refit(self, version, *, adapters_only):
        calls = [lambda e=engine: e.refit(version) for engine in self.engines]
        *received, sent = outcomes(
            *calls, lambda: self.sender.send(version, adapters_only=adapters_only)
        )
        return [sent, *received]

    def good_refit(self, version, *, adapters_only):
        """Refit, commit, and compare every engine; return the sender's report."""
        results = self.refit(version, adapters_only=adapters_only)
        must(results)
        self.sender.commit(version)
        wanted = {**self.base, **self.adapters}
        for engine in self.engines:
            assert engine.receiver.require_ready() == version
            assert engine.weights.keys() == wanted.keys()
            assert all(torch.equal(engine.weights[name], wanted[name]) for name in wanted)
            assert engine.order == list(self.adapters if adapters_only else wanted)
        return results[0]


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.promise
def test_the_base_is_sent_once(transport, num_buffers):
    with Pair(transport, 2, num_buffers=num_buffers) as pair:
        full = pair.good_refit(1, adapters_only=False)
        own = sum(tensor.nbytes for tensor in pair.adapters.values())
        everything = own + sum(tensor.nbytes for tensor in pair.base.values())
        assert full.bytes == everything <= full.bytes_sent
        for version in range(2, 6):
            pair.change(version)
            report = pair.good_refit(version, adapters_only=True)
            assert report.bytes == everything
            assert own <= report.bytes_sent <= own + ALIGNMENT * len(pair.adapters)
        pair.change(6)
        assert pair.good_refit(6, adapters_only=False).bytes_sent == full.bytes_sent


def test_adapters_are_under_two_percent_of_the_weights():
    """Rank 4 on layers of 1,024 dims, counted on both sides, with the buckets of any model."""
    base = {f"{layer}.weight": torch.zeros(1024, 1024) for layer in LAYERS}
    adapters = {}
    for layer in LAYERS:
        adapters |= {layer + DOWN: torch.zeros(4, 1024), layer + UP: torch.zeros(1024, 4)}
    reports = []
    with RefitSender(
        TensorSource(base), adapters=TensorSource(adapters), timeout_s=PATIENCE_S
    ) as sender:
        engine = Engine(sender.address)
        for version, only in ((1, False), (2, True)):
            both = outcomes(
                lambda v=version: engine.refit(v),
                lambda v=version, o=only: sender.send(v, adapters_only=o),
            )
            must(both)
            sender.commit(version)
            reports.append(both)
        engine.receiver.close()
    for full, alone in zip(*reports, strict=True):
        assert full.bytes_sent == alone.bytes
        assert 0 < alone.bytes_sent < 0.02 * full.bytes_sent


def test_a_rank_without_receivers_reads_what_the_others_send():
    base, adapters = some_base(), some_adapters()
    read = []

    class Noting(TensorSource):
        def __iter__(self):
            for name, tensor in super().__iter__():
                read.append(name)
                yield name, tensor

    with RefitSender(Noting(base), num_receivers=0, adapters=Noting(adapters)) as sender:
        sender.send(1)
        assert read == [*base, *adapters]
        read.clear()
        sender.send(2, adapters_only=True)
        assert read == [*adapters]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_new_engine_asks_for_the_base(transport):
    with Pair(transport, 2) as pair:
        pair.good_refit(1, adapters_only=False)
        pair.engines[1].receiver.close()
        pair.engines[1] = Engine(pair.sender.address, 1)
        pair.change(2)
        failed = pair.refit(2, adapters_only=True)
        assert all(isinstance(error, RefitError) for error in failed), failed
        assert "receiver 1" in str(failed[0]) or "rank 1" in str(failed[0])
        assert "holds no base" in str(failed[0])
        assert "send everything" in str(failed[0])
        assert [engine.receiver.held_base is None for engine in pair.engines] == [False, True]
        pair.good_refit(3, adapters_only=False)
        pair.change(4)
        pair.good_refit(4, adapters_only=True)


def test_an_engine_that_lost_its_weights_asks_for_the_base():
    with Pair() as pair:
        pair.good_refit(1, adapters_only=False)
        pair.engines[0].receiver.forget_base()
        with pytest.raises(RefitError, match="holds no base"):
            must(pair.refit(2, adapters_only=True))
        pair.good_refit(3, adapters_only=False)


def test_a_sender_without_a_base_of_its_own_sends_no_adapters():
    """An engine's base is that of one sender, by its digest."""
    with Pair() as pair:
        with pytest.raises(RefitError, match="has not sent any: send everything"):
            must(pair.refit(1, adapters_only=True))
        pair.good_refit(2, adapters_only=False)
        pair.sender._base_digest ^= 1
        with pytest.raises(
            RefitError, match=r"holds the base [0-9a-f]{16} and the sender has sent"
        ):
            must(pair.refit(3, adapters_only=True))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_failed_adapters_keep_the_base(transport):
    """In place they poison; the base is still held, so that adapters alone heal."""
    with Pair(transport) as pair:
        pair.good_refit(1, adapters_only=False)
        source = pair.sender._adapters

        class Breaking:
            def __iter__(self):
                yield from list(source)[:5]
                raise OSError("the trainer breaks off")

        pair.sender._adapters = Breaking()
        results = pair.refit(2, adapters_only=True)
        assert isinstance(results[0], OSError)
        with pytest.raises(PoisonedError, match="breaks off"):
            pair.engines[0].receiver.require_ready()
        pair.sender._adapters = source
        pair.change(3)
        pair.good_refit(3, adapters_only=True)


def test_a_failed_base_is_asked_for_again():
    with Pair() as pair:
        pair.good_refit(1, adapters_only=False)
        source = pair.sender._source

        class Breaking:
            def __iter__(self):
                yield from list(source)[:3]
                raise OSError("the trainer breaks off")

        pair.sender._source = Breaking()
        assert isinstance(pair.refit(2, adapters_only=False)[0], OSError)
        pair.sender._source = source
        assert pair.engines[0].receiver.held_base is None
        with pytest.raises(RefitError, match="holds no base"):
            must(pair.refit(3, adapters_only=True))
        pair.good_refit(4, adapters_only=False)


@pytest.mark.parametrize("adapters_only", [False, True])
def test_staged_adapters_that_fail_leave_the_old_ones(adapters_only):
    with Pair() as pair:
        pair.good_refit(1, adapters_only=False)
        receiver, swapped = pair.engines[0].receiver, []

        def stage(version, load):
            receiver.begin(version, swap=lambda: swapped.append(version))
            return receiver.receive(version, load)

        def refuse(tensors):
            raise RuntimeError(f"{len(tensors)} tensors that the engine does not take")

        must(
            outcomes(
                lambda: stage(2, lambda tensors: None),
                lambda: pair.sender.send(2, adapters_only=True),
            )
        )
        pair.sender.commit(2)
        assert receiver.require_ready() == 2
        assert swapped == [2]
        results = outcomes(
            lambda: stage(3, refuse), lambda: pair.sender.send(3, adapters_only=adapters_only)
        )
        assert all(isinstance(result, RefitError) for result in results)
        assert receiver.require_ready() == 2
        assert swapped == [2]


def test_no_bucket_has_base_and_adapters():
    base, adapters = some_base(), some_adapters()
    metadata = [*TensorSource(base).metadata(), *TensorSource(adapters).metadata()]
    for bucket_bytes in (256, 4096, 64 << 10, 1 << 20):
        plan = RefitPlan.of(metadata, bucket_bytes, adapters_from=len(base))
        for bucket in plan.buckets:
            kinds = {piece.tensor >= len(base) for piece in bucket.pieces}
            assert kinds == {bucket.index >= plan.first_adapter_bucket}
        assert RefitPlan.from_wire(plan.to_wire()) == plan
        assert RefitPlan.of(metadata, bucket_bytes).hash != plan.hash
    with pytest.raises(ValueError, match="adapters_from=26 with 26 tensors"):
        RefitPlan.of(metadata, adapters_from=len(metadata))


def edited(**changes):
    return {**some_adapters(), **changes}


@pytest.mark.parametrize(
    ("adapters", "reason"),
    [
        ({}, "adapters has no tensors"),
        ({"model.norm.weight": torch.zeros(3)}, "is not the name of an adapter"),
        ({LAYERS[0] + DOWN: torch.zeros(RANK, 48)}, r"has no .*up\.lora_B\.weight"),
        (edited(**{f"other{DOWN}": torch.zeros(2, 3)}), r"has no other\.weight"),
        (edited(**{LAYERS[0] + UP: torch.zeros(64, 3)}), "are no adapter of"),
        (edited(**{LAYERS[0] + DOWN: torch.zeros(RANK, 47)}), "are no adapter of"),
    ],
)
def test_adapters_that_do_not_fit_the_base_are_refused(adapters, reason):
    with pytest.raises(ValueError, match=reason):
        RefitSender(TensorSource(some_base()), adapters=TensorSource(adapters))


def test_what_adapters_contradict_is_refused():
    base, adapters = TensorSource(some_base()), TensorSource(some_adapters())
    with pytest.raises(ValueError, match="delta=True contradicts adapters"):
        RefitSender(base, adapters=adapters, delta=True)
    for verify in ("none", "weights"):
        with pytest.raises(ValueError, match=f"adapters contradict verify='{verify}'"):
            RefitSender(base, adapters=adapters, verify=verify)
    with RefitSender(base) as sender, pytest.raises(ValueError, match="has no adapters"):
        sender.send(1, adapters_only=True)
