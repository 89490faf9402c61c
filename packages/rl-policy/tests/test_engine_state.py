"""What an engine may do in which state."""

from types import SimpleNamespace

import pytest
from rl_policy.generation.state import TAGS, EngineState, EngineStateError
from rl_policy.generation.vllm.engine.running import RequestLoop
from rl_policy.generation.vllm.engine.turns import EngineThread
from rl_policy.generation.vllm.engine.updates import EngineUpdates
from rl_policy.generation.vllm.engine.vllm_engine import VllmEngine


@pytest.fixture
def state():
    return EngineState()


def refit(state, version):
    state.begin_update(version)
    state.receive()
    state.require_commit(version)
    state.commit()


def test_an_engine_starts_awake_with_weights_of_its_own(state):
    state.require_generate()
    assert state.version == -1


def test_an_engine_that_sleeps_says_what_sleeps_and_what_wakes_it(state):
    state.sleep(level=1)
    message = r"while weights and kv_cache sleep: call prepare_for_generation\(\) first"
    with pytest.raises(EngineStateError, match=message):
        state.require_generate()
    assert state.asleep() == ["weights", "kv_cache"]
    state.wake(["weights"])
    with pytest.raises(EngineStateError, match="while kv_cache sleep"):
        state.require_generate()
    assert state.asleep() == ["kv_cache"]
    assert state.asleep(["weights"]) == []
    state.wake(["kv_cache"])
    state.require_generate()
    assert state.asleep() == []


def test_an_unknown_tag_is_refused(state):
    with pytest.raises(ValueError, match=r"tags=\['cache'\] are unknown"):
        state.asleep(["cache"])


def test_the_deeper_sleep_loses_the_weights(state):
    state.sleep(level=2)
    state.wake(TAGS)
    with pytest.raises(EngineStateError, match=r"sleep_level=2.* dropped the weights"):
        state.require_generate()
    refit(state, 0)
    state.require_generate()


def test_a_refit_brings_a_version(state):
    refit(state, 5)
    assert state.version == 5
    refit(state, 6)
    assert state.version == 6


def test_a_stale_version_is_refused_and_changes_nothing(state):
    refit(state, 5)
    for version in (4, 5):
        with pytest.raises(ValueError, match=f"version={version} is not newer than version 5"):
            state.begin_update(version)
    state.require_generate()


def test_a_version_is_not_negative(state):
    with pytest.raises(ValueError, match="version=-1 is not newer"):
        state.begin_update(-1)


def test_nothing_is_sampled_while_weights_are_on_their_way(state):
    state.begin_update(5)
    with pytest.raises(EngineStateError, match="weights of version 5 are on their way"):
        state.require_generate()


def test_a_refit_is_abandoned_for_sleep(state):
    state.begin_update(5)
    state.sleep(level=1)
    state.wake(TAGS)
    with pytest.raises(EngineStateError, match="refit to version 5 was abandoned for the engine's"):
        state.require_generate()
    with pytest.raises(EngineStateError, match=r"while the weights are lost: call begin_update"):
        state.require_update("update", 5)
    refit(state, 5)
    state.require_generate()


def test_a_version_is_committed_once(state):
    assert not state.has_committed(5)
    refit(state, 5)
    assert state.has_committed(5)
    assert not state.has_committed(4)
    state.begin_update(6)
    assert not state.has_committed(5)


def test_a_commit_needs_all_weights_of_its_own_version(state):
    with pytest.raises(EngineStateError, match=r"call begin_update\(5\) first"):
        state.require_commit(5)
    state.begin_update(5)
    with pytest.raises(EngineStateError, match=r"commit_update\(5\): not all weights have arrived"):
        state.require_commit(5)
    state.receive()
    with pytest.raises(EngineStateError, match=r"does not belong to begin_update\(5\)"):
        state.require_commit(6)
    state.require_commit(5)


def test_a_failed_refit_stays_in_the_way_until_a_full_one(state):
    state.begin_update(5)
    state.lose("the refit to version 5 failed (a bucket is missing)")
    with pytest.raises(EngineStateError, match=r"a bucket is missing.*Send all weights again"):
        state.require_generate()
    with pytest.raises(EngineStateError, match="while the weights are lost"):
        state.require_commit(5)
    refit(state, 5)
    state.require_generate()


def test_weights_that_sleep_take_no_update(state):
    state.sleep(level=1)
    with pytest.raises(EngineStateError, match="begin_update is not allowed while the weights sle"):
        state.begin_update(0)
    state.wake(["weights"])
    state.begin_update(0)


class DeviceMemory:
    """vLLM's calls about memory, on a device that has room for some of it."""

    def __init__(self, *, room):
        self.room, self.calls = set(room), []
        self.is_busy = False

    def wake_up(self, tags):
        self.calls.append(f"wake {' and '.join(tags)}")
        if not self.room.issuperset(tags):
            raise RuntimeError("CUDA out of memory")

    def sleep(self, level):
        self.calls.append("sleep")
        if self.is_busy:
            raise AssertionError("Memory usage increased after sleeping.")

    def collective_rpc(self, attempt, args):
        self.calls.append(f"workers: {args[0]}")
        return []


def engine_on(memory):
    engine = object.__new__(VllmEngine)
    engine._state, engine._llm, engine._can_sleep = EngineState(), memory, True
    engine._config, engine._adapter = SimpleNamespace(sleep_level=1, generate_timeout_s=60), None
    engine._thread = EngineThread()
    engine._requests = RequestLoop(engine._thread, step=dict, abort=list)  # of none
    engine._updates = EngineUpdates(
        memory,
        config=engine._config,
        thread=engine._thread,
        requests=engine._requests,
        state=engine._state,
        first_receiver=0,
    )
    return engine


def test_memory_that_there_was_no_room_for_sleeps_on():
    memory = DeviceMemory(room=["weights"])
    engine = engine_on(memory)
    engine.sleep()
    assert not engine.wake(["weights"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.wake(None)
    with pytest.raises(EngineStateError, match="while kv_cache sleep"):
        engine._state.require_generate()
    memory.room.add("kv_cache")
    assert engine.wake(None)
    assert memory.calls == ["sleep", "wake weights", *["wake kv_cache"] * 3]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_fails_to_sleep_has_its_memory_back(level):
    memory = DeviceMemory(room=[*TAGS, "scheduling"])
    engine = engine_on(memory)
    engine._config.sleep_level = level
    memory.is_busy = True
    with pytest.raises(EngineStateError, match="awake again: Memory usage increased"):
        engine.sleep()
    assert memory.calls == ["sleep", "workers: wake_up", "wake scheduling"]
    assert engine._state.asleep() == []
    if level == 2:
        with pytest.raises(EngineStateError, match="dropped the weights"):
            engine._state.require_generate()
    memory.is_busy = False
    engine.sleep()
    assert engine._state.asleep() == list(TAGS)


def test_clients_that_wait_are_woken_by_all_that_lets_an_engine_sample():
    engine, woken = engine_on(DeviceMemory(room=TAGS)), []
    with engine._requests.waking(lambda: woken.append(engine._state.version)):
        engine.sleep()
        woken.clear()
        engine.wake(None)
        assert woken == [-1]
        engine._state.begin_update(3)
        engine._state.receive()
        engine._updates._loaded = {"by name"}
        engine.commit_update(3)
        assert woken == [-1, 3]


@pytest.mark.parametrize(
    ("woken", "calls"),
    [("weights", ["sleep"]), ("kv_cache", ["wake weights", "sleep"])],
    ids=["weights", "kv_cache"],
)
def test_an_engine_that_is_half_awake_gives_its_memory_away_as_well(woken, calls):
    memory = DeviceMemory(room=TAGS)
    engine = engine_on(memory)
    engine.sleep()
    engine.sleep()
    assert memory.calls == ["sleep"]
    engine.wake([woken])
    memory.calls.clear()
    engine.sleep()
    assert memory.calls == calls
    assert engine._state.asleep() == list(TAGS)


def test_a_staged_update_leaves_the_engine_sampling(state):
    refit(state, 1)
    state.begin_update(2, staged=True)
    state.require_generate()
    state.receive()
    state.require_generate()
    assert state.version == 1
    state.start_swap()
    with pytest.raises(EngineStateError, match="version 2 are on their way"):
        state.require_generate()
    state.commit()
    assert state.has_committed(2)


@pytest.mark.parametrize("is_received", [False, True])
def test_a_staged_update_that_fails_changes_nothing(state, is_received):
    refit(state, 1)
    state.begin_update(2, staged=True)
    if is_received:
        state.receive()
    state.lose("the sender is gone")
    state.require_generate()
    assert state.has_committed(1)
    with pytest.raises(EngineStateError, match="while the weights are committed"):
        state.require_commit(2)


def test_a_swap_that_fails_loses_the_weights(state):
    state.begin_update(2, staged=True)
    state.receive()
    state.start_swap()
    state.lose("no room")
    with pytest.raises(EngineStateError, match=r"no room\. Send all weights again"):
        state.require_generate()


def test_staging_does_not_heal_lost_weights(state):
    state.begin_update(2)
    state.lose("the sender is gone")
    state.begin_update(2, staged=True)
    with pytest.raises(EngineStateError, match="on their way"):
        state.require_generate()
    state.receive()
    state.start_swap()
    state.commit()
    state.require_generate()


def test_sleep_on_level_2_drops_weights_beside_a_staged_update(state):
    state.begin_update(2, staged=True)
    state.sleep(level=2)
    state.wake(TAGS)
    with pytest.raises(EngineStateError, match="dropped the weights"):
        state.require_generate()
