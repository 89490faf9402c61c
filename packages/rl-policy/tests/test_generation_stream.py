"""Submissions without waiting: the loop of an engine, the driver's tickets, and the fallback."""

import os
import random
import signal
import sys
import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import pytest
import ray
import torch
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_interfaces import FinishedSubmission, StreamFullError, TicketsLostError
from rl_policy import RayVirtualCluster, RayWorkerGroup
from rl_policy.generation.stream import SampledAtCollect
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.generation.vllm.engine.running import EndedSubmission, RequestLoop
from rl_policy.generation.vllm.engine.turns import EngineThread
from rl_policy.generation.vllm.stream import LANES, EngineLostError, EngineStream
from rl_policy.ray.failures import WorkerDiedError
from rl_policy.ray.sharding import NamedSharding

# Workers cannot import this module, whose class is sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass
class Output:
    request_id: str
    finished: bool = True


class Scheduler:
    """Ends each request after a number of steps of its own, in the engine's thread."""

    def __init__(self, thread):
        self.left, self.steps, self.threads = {}, 0, set()
        self.gate = threading.Event()
        self.gate.set()
        self.loop = RequestLoop(thread, step=self.step, abort=self.abort)
        self.breaks_at = None

    def step(self):
        self.gate.wait(PATIENCE_S)
        self.threads.add(threading.current_thread().name)
        self.steps += 1
        if self.steps == self.breaks_at:
            raise ValueError("broken")
        self.left = {name: count - 1 for name, count in self.left.items()}
        ended = [name for name, count in self.left.items() if not count]
        for name in ended:
            del self.left[name]
        # As vLLM: in any order, under the public name.
        random.shuffle(ended)
        return [Output(name.partition("-")[0]) for name in ended]

    def abort(self, names):
        for name in names:
            del self.left[name]

    def add_all(self, *batches):
        """Add batches in one turn, so that no step runs in between."""
        return [self.add(**counts) for counts in batches]

    def add(self, **counts):
        names = {f"{name.removeprefix('r')}-abc": count for name, count in counts.items()}
        self.left |= names
        return self.loop.add([*names])


@pytest.fixture
def thread():
    thread = EngineThread()
    yield thread
    thread.close()


@pytest.fixture
def scheduler(thread):
    return Scheduler(thread)


def names_of(batch):
    return [output.request_id for output in batch.result(PATIENCE_S)]


def test_batches_share_steps_and_finish_out_of_order(thread, scheduler):
    scheduler.gate.clear()
    batches = ({"r0": 4, "r1": 9}, {"r2": 2, "r3": 1, "r4": 2})
    first, second = thread.run(scheduler.add_all, *batches)
    assert not scheduler.loop.is_idle
    scheduler.gate.set()
    assert names_of(second) == ["2", "3", "4"]
    assert names_of(first) == ["0", "1"]
    assert scheduler.loop.wait_idle(PATIENCE_S)
    # Together, and not one after the other: the longest request decides.
    assert scheduler.steps <= 10
    assert len(scheduler.threads) == 1
    again = thread.run(scheduler.add, r5=1)
    assert names_of(again) == ["5"]
    assert names_of(thread.run(scheduler.loop.add, [])) == []


def test_a_failure_reaches_all_that_wait_though_one_cannot_take_it(thread, scheduler, caplog):
    scheduler.gate.clear()
    scheduler.breaks_at = 1
    received = []

    def refuse(error):
        raise OSError("the client has gone")

    def add():
        batch = scheduler.add(r0=9)
        for name, deliver in (("1", received.append), ("2", refuse), ("3", received.append)):
            scheduler.left[f"{name}-abc"] = 9
            scheduler.loop.add_stream(name, internal=f"{name}-abc", deliver=deliver)
        return batch

    batch = thread.run(add)
    scheduler.gate.set()
    with pytest.raises(ValueError, match="broken"):
        batch.result(PATIENCE_S)
    assert scheduler.loop.wait_idle(PATIENCE_S)
    assert [str(error) for error in received] == ["broken", "broken"]
    assert "2-abc: a client did not take the failure" in caplog.text
    assert "the client has gone" in caplog.text


def test_a_cancelled_batch_is_aborted_and_the_others_go_on(thread, scheduler):
    scheduler.gate.clear()
    first, second = thread.run(scheduler.add_all, {"r0": 1, "r1": 1000}, {"r2": 3})
    thread.post(lambda: scheduler.loop.cancel(first))
    scheduler.gate.set()
    assert names_of(second) == ["2"]
    with pytest.raises(CancelledError):
        first.result(0)
    assert scheduler.loop.wait_idle(PATIENCE_S)
    assert not scheduler.left
    thread.run(scheduler.loop.cancel, second)
    assert names_of(second) == ["2"]


def test_a_step_that_fails_ends_all_batches_and_the_next_may_run(thread, scheduler):
    scheduler.breaks_at = 2
    for batch in thread.run(scheduler.add_all, {"r0": 5}, {"r1": 7}):
        with pytest.raises(ValueError, match="broken"):
            batch.result(PATIENCE_S)
    assert scheduler.loop.wait_idle(PATIENCE_S)
    assert not scheduler.left
    assert names_of(thread.run(scheduler.add, r2=1)) == ["2"]


def test_an_output_that_cannot_be_delivered_ends_all_batches(thread, scheduler):
    def refuse(output):
        raise ValueError("no room for it")

    def add():
        scheduler.left |= {"9-abc": 2}
        scheduler.loop.add_stream("9", internal="9-abc", deliver=refuse)
        return scheduler.add(r0=1000)

    batch = thread.run(add)
    with pytest.raises(ValueError, match="no room for it"):
        batch.result(PATIENCE_S)
    assert scheduler.loop.wait_idle(PATIENCE_S)
    assert scheduler.loop.num_streams == 0


class SleepyEngine:
    """Ends a submission of the `wait` seconds that its rows name; fails one of `fails`."""

    def __init__(self):
        self._ended = SimpleQueue()
        self._timers = {}

    def submit(self, key, data, *, fails=False, is_refused=False):
        if is_refused:
            raise RuntimeError("asleep")
        output = (
            None if fails else BatchedDataDict(rows=data["wait"], pid=[os.getpid()] * data.size)
        )
        ended = EndedSubmission(
            key=key,
            output=output,
            finish_reasons=("stop",) * data.size,
            error="EngineStateError: lost" if fails else "",
        )
        self._timers[key] = threading.Timer(float(data["wait"].max()), self._end, [ended])
        self._timers[key].start()

    def _end(self, ended):
        self._timers.pop(ended.key, None)
        self._ended.put(ended)

    def cancel(self, keys):
        for key in keys:
            if timer := self._timers.pop(key, None):
                timer.cancel()

    def num_running(self):
        return len(self._timers)

    def process_id(self):
        return os.getpid()

    def next_ended(self, timeout_s):
        ended = []
        try:
            ended.append(self._ended.get(timeout=timeout_s))
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            return ended

    def shutdown(self):
        for timer in [*self._timers.values()]:
            timer.cancel()


slow = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(shared_ray):
    cluster = RayVirtualCluster([2])
    yield cluster
    cluster.shutdown()


@pytest.fixture
def group(cluster):
    sharding = NamedSharding(np.arange(2), ["data_parallel"])
    group = RayWorkerGroup(cluster, SleepyEngine, sharding=sharding, name="sleepy", lanes=LANES)
    yield group
    group.shutdown()


def stream_of(group, limit=100):
    return EngineStream(group, engine_ranks=range(2), limit=limit, timeout_s=PATIENCE_S)


def rows(*waits):
    return BatchedDataDict(wait=torch.tensor(waits))


def pid_of(finished):
    return finished.output["pid"][0]


@slow
def test_what_finishes_first_is_collected_first_and_each_once(group):
    stream = stream_of(group)
    slow, quick = stream.submit(rows(1.5, 1.5)), stream.submit(rows(0.1))
    third = stream.submit(rows(0.1))
    assert stream.room == 96
    first = []
    while len(first) < 2:
        first += stream.collect(timeout_s=PATIENCE_S)
    assert sorted(each.ticket for each in first) == [quick, third]
    # The engine with fewer rows got both.
    assert len({pid_of(each) for each in first}) == 1
    assert stream.room == 98
    assert stream.collect([slow], timeout_s=0) == []
    (last,) = stream.collect([slow], timeout_s=PATIENCE_S)
    assert last.output["rows"].tolist() == [1.5, 1.5]
    assert last.finish_reasons == ("stop", "stop")
    assert pid_of(last) != pid_of(first[0])
    assert stream.collect(timeout_s=PATIENCE_S) == []
    assert stream.room == 100
    with pytest.raises(ValueError, match=r"tickets \[0\] are unknown"):
        stream.collect([slow], timeout_s=0)


@slow
def test_no_more_rows_are_in_flight_than_the_limit(group):
    stream = stream_of(group, limit=3)
    with pytest.raises(ValueError, match="4 rows are more than the stream's limit of 3"):
        stream.submit(rows(0.1, 0.1, 0.1, 0.1))
    first = stream.submit(rows(0.1, 0.1))
    with pytest.raises(StreamFullError, match="2 rows are in flight, and 2 more"):
        stream.submit(rows(0.1, 0.1))
    second = stream.submit(rows(PATIENCE_S))
    assert stream.room == 0
    stream.cancel([second])
    assert stream.room == 1
    (finished,) = stream.collect(timeout_s=PATIENCE_S)
    assert finished.ticket == first
    assert stream.room == 3
    assert group.run_all("num_running") == [0, 0]


@slow
def test_a_failed_submission_is_named_and_the_others_go_on(group):
    stream = stream_of(group)
    lost = stream.submit(rows(0.1), fails=True)
    kept = stream.submit(rows(1.0))
    with pytest.raises(TicketsLostError, match=r"\[0\] failed on rank 0 .*lost") as error:
        stream.collect([lost, kept], timeout_s=PATIENCE_S)
    assert error.value.tickets == [lost]
    assert [each.ticket for each in stream.collect(timeout_s=PATIENCE_S)] == [kept]


@slow
def test_a_refused_submission_is_named_and_the_others_go_on(group):
    stream = stream_of(group)
    kept, refused = stream.submit(rows(1.0)), stream.submit(rows(1.0), is_refused=True)
    with pytest.raises(TicketsLostError, match=r"has refused the .* 1: asleep") as error:
        stream.settle()
    assert error.value.tickets == [refused]
    stream.settle()
    assert [each.ticket for each in stream.collect(timeout_s=PATIENCE_S)] == [kept]
    assert stream.room == 100


@slow
def test_a_dead_engine_is_named_with_its_tickets_and_the_other_goes_on(group):
    stream = stream_of(group)
    # To either engine, in turn.
    tickets = [stream.submit(rows(0.1)), stream.submit(rows(0.1))]
    finished = []
    while len(finished) < 2:
        finished += stream.collect(
            tickets[:1] if not finished else tickets[1:], timeout_s=PATIENCE_S
        )
    dead = stream.submit(rows(PATIENCE_S))
    kept = stream.submit(rows(2.0))
    os.kill(pid_of(finished[0]), signal.SIGKILL)
    with pytest.raises(EngineLostError, match=r"rank 0 of sleepy died") as error:
        stream.collect([dead], timeout_s=PATIENCE_S)
    assert error.value.tickets == [dead]
    assert isinstance(error.value, WorkerDiedError)
    assert f"the submissions [{dead}] are lost" in error.value.__notes__
    assert [each.ticket for each in stream.collect(timeout_s=PATIENCE_S)] == [kept]
    # What comes now is for the engine that is left.
    again = stream.submit(rows(0.1))
    (last,) = stream.collect(timeout_s=PATIENCE_S)
    assert last.ticket == again
    assert pid_of(last) == pid_of(finished[1])


@slow
def test_engines_that_another_call_has_found_dead_are_named_with_all_their_tickets(cluster):
    sharding = NamedSharding(np.arange(2), ["data_parallel"])
    group = RayWorkerGroup(
        cluster,
        SleepyEngine,
        sharding=sharding,
        name="sleepy",
        lanes=LANES,
        ranks_stand_alone=True,
    )
    try:
        stream = stream_of(group)
        # To either engine, in turn.
        tickets = [stream.submit(rows(PATIENCE_S)), stream.submit(rows(PATIENCE_S))]
        for process_id in group.run_all("process_id"):
            os.kill(process_id, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            group.run_all("num_running")
        with pytest.raises(EngineLostError, match="every engine of sleepy died") as error:
            stream.collect(tickets, timeout_s=PATIENCE_S)
        assert error.value.tickets == tickets
    finally:
        group.shutdown()


class OneEngine:
    """A group of one engine, which lives."""

    ranks_stand_alone, lost_ranks = True, ()


class FailingMembership:
    """An engine that is started anew fails once for good."""

    num_calls = 0

    def advance(self):
        self.num_calls += 1
        if self.num_calls == 1:
            raise RuntimeError("no room")


def test_an_engine_that_does_not_start_again_costs_none_of_what_has_finished():
    engines = object.__new__(VllmGeneration)
    engines._group, engines._members = None, FailingMembership()
    engines._stream = EngineStream(OneEngine(), engine_ranks=[0], limit=9, timeout_s=PATIENCE_S)
    finished = FinishedSubmission(ticket=3, output=rows(0.0), finish_reasons=("stop",))
    engines._stream.put_back([finished])
    with pytest.raises(RuntimeError, match="no room"):
        engines.collect(timeout_s=PATIENCE_S)
    assert engines.collect(timeout_s=PATIENCE_S) == [finished]
    assert engines.collect(timeout_s=PATIENCE_S) == []


class Echo:
    """Continues a prompt with its first token, as often as that says, up to three times."""

    def generate(self, data, greedy=False):
        count = data["input_ids"][:, 0].clamp(max=3)
        ends = data["input_lengths"] + count
        ids = torch.full((data.size, int(ends.max())), 7 if greedy else 8)
        return BatchedDataDict(
            output_ids=ids, generation_lengths=count, unpadded_sequence_lengths=ends
        )


def prompt(*first):
    return BatchedDataDict(
        input_ids=torch.tensor(first)[:, None], input_lengths=torch.ones(len(first)).long()
    )


def test_the_fallback_samples_what_is_collected():
    stream = SampledAtCollect(Echo(), max_new_tokens=3, stop_token_ids=[7], limit=4)
    first, second = stream.submit(prompt(1, 5)), stream.submit(prompt(5), greedy=True)
    with pytest.raises(StreamFullError):
        stream.submit(prompt(1, 1))
    assert stream.room == 1
    (finished,) = stream.collect([second], timeout_s=0)
    assert finished.finish_reasons == ("stop",)
    (finished,) = stream.collect(timeout_s=0)
    assert finished.ticket == first
    assert finished.output["generation_lengths"].tolist() == [1, 3]
    assert finished.finish_reasons == ("stop", "length")
    third = stream.submit(prompt(1))
    stream.cancel([third])
    assert stream.collect(timeout_s=0) == []
    assert stream.room == 4
    with pytest.raises(ValueError, match=r"tickets \[2\] are unknown"):
        stream.cancel([third])
