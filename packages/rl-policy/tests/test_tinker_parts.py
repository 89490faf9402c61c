"""The parts of the server for the tinker client, without a server."""

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE_S
from rl_interfaces import LossInput
from rl_policy.tinker.futures import Futures, InOrder, Job, JobThread
from rl_policy.tinker.losses import KINDS, make_loss
from rl_policy.tinker.requests import RequestError
from rl_policy.tinker.store import WEIGHTS, Checkpoint, CheckpointStore
from rl_policy.tinker.wire import Datum, address_of_call, read_call
from tolerances import REPEATED, SUMS

pytestmark = pytest.mark.needs("rl-policy[tinker]")

VOCAB = 11


def make_data(name, *, is_next, seed=0):
    random = np.random.default_rng(seed)
    data = []
    for length in (3, 5, 1):
        tokens = random.integers(0, VOCAB, length)
        targets = random.integers(0, VOCAB, length)
        if is_next:
            targets[:-1] = tokens[1:]
        columns = {key: random.normal(size=length).astype(np.float32) for key in KINDS[name].inputs}
        if "logprobs" in columns:
            columns["logprobs"] = -2 - np.abs(columns["logprobs"])
        if "sequence_ratio_mask" in columns:
            columns["sequence_ratio_mask"] = np.ones(length, np.float32)
            columns["sequence_ratio_mask"][: length // 2] = 0
        data.append(Datum(tokens=tokens, inputs={"target_tokens": targets, **columns}))
    return data


def documented_loss(name, datum, p, *, low, high, beta):
    """Return a datum's loss as the client's documentation writes it, from its target's p."""
    inputs = {key: torch.tensor(each, dtype=torch.float64) for key, each in datum.inputs.items()}
    if name == "cross_entropy":
        return (-p * inputs["weights"]).sum()
    q, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(p - q)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "gspo":
        chosen = inputs["sequence_ratio_mask"] != 0
        ratio = torch.exp((p.detach() - q)[chosen].mean() + p - p.detach())
    clipped = torch.clamp(ratio, low, high)
    if name in ("ppo", "gspo"):
        return -torch.min(ratio * advantages, clipped * advantages).sum()
    if name == "cispo":
        return -(clipped.detach() * p * advantages).sum()
    return -(p * advantages - 0.5 * beta * (p - q) ** 2).sum()


@pytest.mark.parametrize("is_next", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_losses_are_as_documented(name, is_next):
    options = {"low": 0.6, "high": 1.3, "beta": 0.2}
    config = {
        key: options[key.removeprefix("clip_").removesuffix("_threshold")]
        for key in KINDS[name].settings
    }
    data = make_data(name, is_next=is_next)
    loss, rows = make_loss(name, config, data)
    assert loss.input_type is (LossInput.LOGPROBS if is_next else LossInput.LOGITS)
    width = rows["input_ids"].shape[1]
    torch.manual_seed(1)
    logits = torch.randn(len(data), width, VOCAB, dtype=torch.float64, requires_grad=True)
    scores = logits.log_softmax(-1)
    own = scores[:, :-1].gather(-1, rows["input_ids"][:, 1:, None])[..., 0]
    given = torch.nn.functional.pad(own, (1, 0)) if is_next else logits
    value, _, found = loss(given, rows, torch.tensor(3.0), torch.tensor(0.0))
    (gradient,) = torch.autograd.grad(value * 3, logits, retain_graph=True)
    expected = []
    for row, datum in enumerate(data):
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        p = scores[row, : len(targets)].gather(-1, targets[:, None])[:, 0]
        expected.append(documented_loss(name, datum, p, **options))
        assert torch.allclose(
            found["logprobs"][row, 1 : len(targets) + 1].double(), p, atol=SUMS, rtol=0
        )
        assert not found["logprobs"][row, len(targets) + 1 :].any()
    assert torch.allclose(
        found["loss"].double(), torch.stack(expected), atol=REPEATED, rtol=REPEATED
    )
    (documented,) = torch.autograd.grad(torch.stack(expected).sum(), logits)
    assert torch.allclose(gradient, documented, atol=REPEATED, rtol=REPEATED)
    assert gradient.abs().max() > 0.01


def test_advantages_of_zero_do_not_overflow():
    inputs = {"target_tokens": np.array([1]), "advantages": np.zeros(1, np.float32)}
    inputs["logprobs"] = np.full(1, -1e4, np.float32)
    loss, rows = make_loss("ppo", {}, [Datum(tokens=np.array([1]), inputs=inputs)])
    logprobs = torch.zeros(1, 2, requires_grad=True)
    value = loss(logprobs, rows, torch.tensor(1.0), torch.tensor(0.0))[0]
    value.backward()
    assert float(value.detach()) == 0
    assert not logprobs.grad.any()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"clip_low_threshold": 2.0}, "clip_low_threshold=2 is above clip_high_threshold=1.2"),
        ({"clip_low_threshold": "x"}, "must be a number"),
        ({"clip_low_threshold": float("nan")}, "must be a number"),
        ({"other": 1.0}, r"'other'\]=1.0: 'ppo' takes"),
    ],
)
def test_bad_settings_of_a_loss(config, message):
    with pytest.raises(RequestError, match=message):
        make_loss("ppo", config, make_data("ppo", is_next=True))


def test_messages_that_are_none():
    for body in (b"\xff\xff", b"\x0a\xff"):
        with pytest.raises(RequestError, match="no ForwardBackwardRequest"):
            address_of_call(body)
    with pytest.raises(RequestError, match="data is empty"):
        read_call(address_of_call(b"")[2])


def in_loop(function):
    return asyncio.run(function())


def test_requests_run_in_order_and_once():
    async def run():
        order, started = InOrder(first=1, gap_s=60), []
        for number in (3, 2, 5, 1):
            future = asyncio.get_running_loop().create_future()
            order.submit(number, lambda number=number: started.append(number), future)
        assert started == [1, 2, 3]
        assert [order.is_past(each) for each in (1, 3, 4, 5, 6)] == [True, True, False, True, False]
        order.skip(4)
        return started

    assert in_loop(run) == [1, 2, 3, 5]


def test_a_request_whose_predecessor_does_not_come_fails():
    async def run():
        order, started = InOrder(first=1, gap_s=0.05), []
        future = asyncio.get_running_loop().create_future()
        order.submit(3, lambda: started.append(3), future)
        with pytest.raises(TimeoutError, match=r"request 3 waits for request 1, .* 0\.05 s"):
            await asyncio.wait_for(future, 10)
        order.submit(4, lambda: started.append(4), asyncio.get_running_loop().create_future())
        return started

    assert in_loop(run) == [4]


def test_jobs_of_a_group_run_together_and_failures_are_their_own():
    batches, gate, fatal = [], threading.Event(), []

    def run(arguments):
        gate.wait(PATIENCE_S)
        batches.append(list(arguments))
        if "bad" in arguments:
            raise ValueError("bad")
        return [each.upper() for each in arguments]

    async def submit():
        thread = JobThread(
            max_size=3, is_fatal=lambda e: isinstance(e, KeyError), on_fatal=fatal.append
        )
        loop, futures = asyncio.get_running_loop(), []
        for argument, group, size in [
            ("first", None, 1),
            ("a", 1, 1),
            ("b", 2, 1),
            ("c", 1, 1),
            ("d", 1, 2),
            ("bad", None, 1),
        ]:
            futures.append(loop.create_future())
            job = Job(run=run, argument=argument, group=group, size=size, future=futures[-1])
            thread.submit(job)
        gate.set()
        found = await asyncio.gather(*futures, return_exceptions=True)
        await asyncio.to_thread(thread.close, 10)
        return found

    *found, error = in_loop(submit)
    assert found == ["FIRST", "A", "B", "C", "D"]
    assert str(error) == "bad"
    assert batches == [["first"], ["a", "c"], ["b"], ["d"], ["bad"]]
    assert not fatal


def test_a_failure_after_the_end_is_not_reported():
    """Ranks that are shut down fail the call in progress, which then ends no server."""
    started, gate, fatal = threading.Event(), threading.Event(), []

    def run(_):
        started.set()
        gate.wait(PATIENCE_S)
        raise KeyError("the ranks are gone")

    async def submit():
        thread = JobThread(max_size=1, is_fatal=lambda e: True, on_fatal=fatal.append)
        future = asyncio.get_running_loop().create_future()
        thread.submit(Job(run=run, argument=None, future=future))
        assert await asyncio.to_thread(started.wait, 60)
        thread.close(0)
        gate.set()
        with pytest.raises(KeyError):
            await future
        await asyncio.to_thread(thread.close, 60)

    in_loop(submit)
    assert not fatal


def test_a_failure_of_all_fails_what_waits_and_what_comes_later():
    gate, fatal = threading.Event(), []

    def run(_):
        gate.wait(PATIENCE_S)
        raise KeyError("the ranks are gone")

    async def submit():
        thread = JobThread(max_size=1, is_fatal=lambda e: True, on_fatal=fatal.append)
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(3)]
        for future in futures[:2]:
            thread.submit(Job(run=run, argument=None, future=future))
        gate.set()
        await asyncio.wait_for(asyncio.gather(*futures[:2], return_exceptions=True), 60)
        thread.submit(Job(run=run, argument=None, future=futures[2]))
        await asyncio.wait_for(asyncio.wait(futures), 60)
        await asyncio.to_thread(thread.close, 60)
        return [future.exception() for future in futures]

    assert in_loop(submit) == fatal * 3
    assert len(fatal) == 1


def test_results_are_kept_for_a_while():
    async def run():
        futures = Futures(kept_s=0.0)
        futures.add("one", owner="s").set_result(1)
        futures.add("two", owner="s")
        futures.note_retrieved("one")
        assert not futures.are_retrieved
        futures.sweep()
        assert futures.get("one") is None
        two = futures.get("two")
        futures.drop("s")
        assert futures.are_retrieved
        assert two.cancelled()
        assert futures.get("two") is None

    in_loop(run)


def checkpoint(name="a", **changes):
    values = {"model": "s1:train:0", "kind": WEIGHTS, "name": name, "base_model": "m", "rank": 2}
    values |= {"layers": ["mlp"], "created": time.time(), "expires": None, "metadata": {}}
    return Checkpoint(**values | changes)


def test_a_state_directory(tmp_path):
    root = tmp_path / "state"
    store = CheckpointStore(root)
    assert root.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ValueError, match="in use by another server"):
        CheckpointStore(root)
    key = store.api_key()
    assert key.startswith("tml-")
    assert (root / "api_key").stat().st_mode & 0o777 == 0o600
    for each in (checkpoint(), checkpoint("b", expires=time.time() - 1)):
        store.write(each, lambda path: path.mkdir(), overwrite=False)
    with pytest.raises(RequestError, match="exists: choose another name"):
        store.write(checkpoint(), lambda path: path.mkdir(), overwrite=False)
    store.close()
    again = CheckpointStore(root)
    assert again.api_key() == key
    assert [each.name for each in again.all_of()] == ["a"]
    with pytest.raises(RequestError, match="b does not exist"):
        again.find("tinker://s1:train:0/weights/b")
    again.remove_expired()
    assert sorted(each.name for each in (root / "checkpoints/s1:train:0/weights").iterdir()) == [
        "a",
        "a.checkpoint.json",
    ]
    for path in ("tinker://../weights/a", "tinker://s/other/a", "tinker://s/weights/../a", "/a"):
        with pytest.raises(RequestError, match="must be tinker://"):
            again.find(path)
    again.remove("tinker://s1:train:0/weights/a")
    assert not again.all_of()
    again.close()
    root.chmod(0o750)
    with pytest.raises(ValueError, match="open to other users"):
        CheckpointStore(root)


def test_a_checkpoint_is_there_only_when_it_is_complete(tmp_path):
    store = CheckpointStore(tmp_path / "state")

    def fail(path):
        path.mkdir()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        store.write(checkpoint(), fail, overwrite=False)
    assert not store.all_of()
    # What is left of it, and what has expired, gives way to another of the same name.
    store.write(checkpoint(expires=time.time() - 1), Path.mkdir, overwrite=False)
    store.write(checkpoint(), Path.mkdir, overwrite=False)
    assert [each.name for each in store.all_of()] == ["a"]
    store.close()


def test_a_key_is_there_only_when_it_is_complete(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "state")

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdopen", fail)
        with pytest.raises(OSError, match="full"):
            store.api_key()
    assert store.api_key().startswith("tml-")
    assert store.api_key() == store.api_key()
    store.close()
