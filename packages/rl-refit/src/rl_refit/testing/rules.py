"""Rules of a transport: tensors arrive bit by bit, and only complete versions are committed.

The first group is `round_trips`, the second, from `a_version_is_valid_from_its_commit` on,
`versions`.
"""

from __future__ import annotations

import torch

from rl_refit import errors
from rl_refit.testing.leftovers import nothing_left
from rl_refit.testing.pair import (
    Engine,
    ReceiverOptions,
    RefitPair,
    Tensors,
    World,
    must,
    outcomes,
    refuses,
    require_errors,
    require_same,
    some_tensors,
)

SHORT_S = 0.4
"""The limit of waits that must time out."""


def kinds_of_tensors() -> Tensors:
    """Return a tensor of every kind that a model may have, by its kind."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def integers(high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=dtype)

    return {
        "float32": normal(17, 31),
        "bfloat16": normal(17, 31).bfloat16(),
        "float16": normal(17, 31).half(),
        "int64": integers(2**62, (9, 5), torch.int64),
        "bool": torch.tensor([True, False, True]),
        "float scalar": torch.tensor(3.5),
        "integer scalar": torch.tensor(7),
        "permuted": normal(6, 5, 4).permute(2, 0, 1),
        "strided": normal(40, 40)[::3, 5:30],
        "expanded": normal(1).expand(8, 9),
        "transposed": normal(301, 401).T,
        "empty": torch.empty(0, 4),
        "not finite": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "larger than a bucket": normal(100_000),
        "odd bytes": integers(255, (70_001,), torch.uint8),
    }


def every_kind_of_tensor_arrives_bit_exact(pair: RefitPair, num_cases: int) -> None:
    """Each kind between two other tensors, then all kinds together."""
    kinds = kinds_of_tensors()
    alone = [
        {"first": torch.ones(3), kind: tensor, "last": torch.ones(5)}
        for kind, tensor in kinds.items()
    ]
    for tensors in [*alone, kinds]:
        with World(pair, tensors) as world:
            world.good_refit(1)


def every_receiver_receives_every_bit(pair: RefitPair, num_cases: int) -> None:
    """One to four receivers, several versions."""
    for num_receivers in range(1, 5):
        with World(pair, some_tensors(), num_receivers) as world:
            for version in range(3):
                world.good_refit(version)


def new_values_arrive_with_every_version(pair: RefitPair, num_cases: int) -> None:
    """Over one connection, whose buffers are reused."""
    tensors = some_tensors()
    with World(pair, tensors) as world:
        for version in range(4):
            world.good_refit(version)
            for tensor in tensors.values():
                tensor += 1


def any_size_and_number_of_buffers_works(pair: RefitPair, num_cases: int) -> None:
    """The sender chooses them; receivers know nothing but the address."""
    for bucket_bytes, num_buffers in [(256, 1), (1024, 3), (5000, 2), (1 << 20, 3)]:
        with World(
            pair, some_tensors(), bucket_bytes=bucket_bytes, num_buffers=num_buffers
        ) as world:
            largest = max(bucket.nbytes for bucket in world.sender.plan.buckets)
            assert largest <= bucket_bytes, f"a bucket of {largest} where {bucket_bytes} were asked"
            for version in range(2):
                world.good_refit(version)
    with World(pair, {}) as world:  # no bucket at all
        world.good_refit(1)


def tied_tensors_are_sent_once(pair: RefitPair, num_cases: int) -> None:
    """Under their first name; other views of the same memory are separate tensors."""
    shared = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    tensors = {"embed": shared, "half": shared[:4], "turned": shared.T, "head": shared}
    with World(pair, tensors) as world:
        must(world.refit(1))
        untied = {name: tensor for name, tensor in tensors.items() if name != "head"}
        require_same(world.engines[0].weights, untied, "the receiver")


def tensors_of_into_are_copied_in_place(pair: RefitPair, num_cases: int) -> None:
    """In full or piece by piece, and they are not passed to `load`."""
    for bucket_bytes in (1024, 1 << 20):
        tensors = some_tensors()
        own = {name: torch.zeros_like(tensor) for name, tensor in list(tensors.items())[::2]}
        places = {name: tensor.data_ptr() for name, tensor in own.items()}
        engine: ReceiverOptions = {"into": own}
        with World(pair, tensors, engine=engine, bucket_bytes=bucket_bytes) as world:
            for version in range(2):
                for tensor in tensors.values():
                    tensor += 1
                must(world.refit(version))
                require_same(own, {name: tensors[name] for name in own}, "`into`")
                others = {name: tensors[name] for name in tensors if name not in own}
                require_same(world.engines[0].weights, others, "`load`")
        assert {name: tensor.data_ptr() for name, tensor in own.items()} == places


def senders_without_receivers_run_beside_others(pair: RefitPair, num_cases: int) -> None:
    """One to four trainer ranks, of which the even ones have one to four receivers each."""
    for num_senders in range(1, 5):
        for num_receivers in range(1, 5):
            _send_side_by_side(pair, num_senders, num_receivers)


def _send_side_by_side(pair: RefitPair, num_senders: int, num_receivers: int) -> None:
    tensors = some_tensors()
    receivers = [(rank + 1) % 2 * num_receivers for rank in range(num_senders)]
    senders = [pair.open_sender(tensors, num_receivers=number) for number in receivers]
    engines = [
        Engine(pair, sender.address, 10 * index + rank)
        for index, sender in enumerate(senders)
        for rank in range(receivers[index])
    ]
    sends = [lambda s=sender: s.send(1) for sender in senders]
    must(outcomes(*sends, *[lambda e=engine: e.refit(1) for engine in engines]))
    for sender in senders:
        sender.commit(1)
    for engine in engines:
        assert engine.receiver.require_ready() == 1
        require_same(engine.weights, tensors, f"a receiver of {num_senders} senders")
    for end in [*senders, *(engine.receiver for engine in engines)]:
        end.close()


def no_resource_is_leaked(pair: RefitPair, num_cases: int) -> None:
    """Neither by closed ends, nor by a sender that was never used or closed."""
    warm_up(pair)
    with nothing_left() as look, World(pair, some_tensors(), 2) as world:
        for version in range(2):
            world.good_refit(version)
        look()
    with nothing_left():
        pair.open_sender(some_tensors())


def warm_up(pair: RefitPair) -> None:
    """Refit once, as libraries keep what they open at their first use."""
    with World(pair, some_tensors()) as world:
        world.good_refit(1)


def a_version_is_valid_from_its_commit(pair: RefitPair, num_cases: int) -> None:
    """The engine is not ready before; the next refit leaves the committed version as it is."""
    with World(pair, some_tensors()) as world:
        (engine,) = world.engines
        receiver = engine.receiver
        assert receiver.version is None, f"version {receiver.version} before any refit"
        refuses(errors.RefitError, receiver.require_ready, "an engine without weights")
        must(world.refit(3))
        assert receiver.version is None, f"version {receiver.version} before the commit"
        refuses(errors.RefitInProgress, receiver.require_ready, "an engine before the commit")
        world.sender.commit(3)
        assert (receiver.require_ready(), receiver.version) == (3, 3)
        must(world.refit(4))
        receiver.commit(4)
        assert receiver.require_ready() == 4
        receiver.begin(5)
        refuses(errors.RefitInProgress, receiver.require_ready, "an engine that has begun")
        assert receiver.version == 4


def only_a_sent_version_is_committed(pair: RefitPair, num_cases: int) -> None:
    """On both sides, and only a version that was begun is received."""
    error = errors.RefitError
    with World(pair, some_tensors()) as world:
        (engine,) = world.engines
        refuses(error, lambda: world.sender.commit(1), "a commit before any refit")
        refuses(error, lambda: engine.receiver.commit(1), "a commit before any refit")
        must(world.refit(1))
        refuses(error, lambda: world.sender.commit(2), "a commit of another version")
        refuses(error, lambda: engine.receiver.commit(2), "a commit of another version")
        refuses(error, lambda: engine.receiver.receive(2, engine.keep), "what was not begun")
        assert engine.receiver.version is None


def a_stale_version_changes_nothing(pair: RefitPair, num_cases: int) -> None:
    """It is refused, the committed version stays valid, and a newer one is accepted."""
    for committed in range(1, 6):
        with World(pair, some_tensors(), 2) as world:
            world.good_refit(committed)
            for engine in world.engines:
                receiver = engine.receiver
                for stale in range(committed + 1):
                    refuses(
                        errors.StaleVersionError,
                        lambda r=receiver, v=stale: r.begin(v),
                        f"version {stale} where {committed} is committed",
                    )
                    assert receiver.require_ready() == committed
            world.good_refit(committed + 1)


def a_sender_of_another_version_is_refused(pair: RefitPair, num_cases: int) -> None:
    """On both sides, and the engine needs a complete refit."""
    with World(pair, some_tensors()) as world:
        (engine,) = world.engines
        results = outcomes(lambda: world.sender.send(1), lambda: engine.refit(2))
        require_errors(results, errors.RefitError, "version 1 was sent where 2 was begun")
        refuses(errors.PoisonedError, engine.receiver.require_ready, "an engine that failed")
        world.good_refit(3)


def unexpected_tensors_are_refused(pair: RefitPair, num_cases: int) -> None:
    """Before any is loaded, by an error that names each of them."""
    tensors = some_tensors()
    expected = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    expected[0] = ("embed.weight", torch.float64, (64, 48))
    expected.append(("bias", torch.float32, (4,)))
    with World(pair, tensors, engine={"expected": expected}) as world:
        results = world.refit(1)
        require_errors(results, errors.PlanMismatchError, "other tensors were expected")
        for error in results:
            for name in ("embed.weight", "bias"):
                assert name in str(error), f"the error does not name {name}: {error}"
        assert not world.engines[0].weights, "tensors of a refused plan were loaded"


def a_failed_load_poisons_all_until_a_full_resend(pair: RefitPair, num_cases: int) -> None:
    """No engine is ready or can commit until all have loaded everything."""
    with World(pair, some_tensors(), 2) as world:
        _, second = world.engines
        must(world.refit(1))
        second.load = lambda tensors: 1 / 0
        results = world.refit(2)
        require_errors(results, errors.RefitError, "the load of receiver 1 failed")
        for error in results:
            assert "ZeroDivisionError" in str(error), f"the error lacks the reason: {error}"
            assert "embed.weight" in str(error), f"the tensor is not named: {error}"
        for engine in world.engines:
            refuses(errors.PoisonedError, engine.receiver.require_ready, "an engine that failed")
            refuses(errors.PoisonedError, lambda e=engine: e.receiver.commit(2), "its commit")
        refuses(errors.RefitError, lambda: world.sender.commit(2), "the sender's commit")
        second.load = second.keep
        world.good_refit(2)


def waits_end_at_their_time_limit(pair: RefitPair, num_cases: int) -> None:
    """That of a sender for its second receiver, and that of a receiver for its sender."""
    sender = pair.open_sender(some_tensors(), num_receivers=2, timeout_s=SHORT_S * pair.patience)
    engine = Engine(pair, sender.address)
    sent, received = outcomes(lambda: sender.send(1), lambda: engine.refit(1))
    assert isinstance(sent, errors.RefitTimeoutError), f"the sender ended with {sent!r}"
    assert isinstance(received, errors.RefitError), f"the receiver ended with {received!r}"
    engine.receiver.close()
    sender.close()
    sender = pair.open_sender(some_tensors())
    engine = Engine(pair, sender.address, timeout_s=SHORT_S * pair.patience)
    refuses(errors.RefitTimeoutError, lambda: engine.refit(1), "a receiver alone")
    engine.receiver.close()
    sender.close()


def a_wrong_token_is_rejected(pair: RefitPair, num_cases: int) -> None:
    """And the receiver with the right token is served afterwards."""
    tensors = some_tensors()
    sender = pair.open_sender(tensors, timeout_s=4 * SHORT_S * pair.patience)
    stranger = Engine(pair, {**sender.address, "token": "00" * 32})
    sent, received = outcomes(lambda: sender.send(1), lambda: stranger.refit(1))
    kind = errors.AuthenticationError
    assert isinstance(received, kind), f"the stranger ended with {received!r}"
    assert isinstance(sent, errors.RefitTimeoutError), f"the sender ended with {sent!r}"
    assert not stranger.weights, "the stranger was given weights"
    stranger.receiver.close()
    engine = Engine(pair, sender.address)
    must(outcomes(lambda: sender.send(2), lambda: engine.refit(2)))
    require_same(engine.weights, tensors, "the receiver with the right token")
    engine.receiver.close()
    sender.close()


def a_new_receiver_replaces_the_one_of_its_rank(pair: RefitPair, num_cases: int) -> None:
    """While the old one is still connected; receivers of other ranks stay."""
    with World(pair, some_tensors(), 2) as world:
        world.good_refit(1)
        old = world.engines[0]
        world.engines[0] = Engine(pair, world.sender.address, 0)
        world.good_refit(2)
        old.receiver.close()
