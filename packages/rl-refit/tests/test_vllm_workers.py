"""What comes back from a call on one worker of an engine; needs no vLLM."""

import pickle

import pytest
from rl_refit import RefitError
from rl_refit.vllm import attempt, finish_update, on_workers


class Worker:
    """What the functions need of vLLM's."""

    weight_transfer_engine = None

    def __init__(self):
        self.calls = []

    def start_weight_update(self):
        self.calls.append("start")

    def finish_weight_update(self):
        self.calls.append("finish")


def divide(worker, numerator, denominator):
    return numerator / denominator


class NeedsTwoError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def fail_with_two(worker):
    raise NeedsTwoError(1, 2)


def test_a_call_returns_its_result_or_its_error():
    assert attempt(Worker(), divide, 3, 2) == 1.5
    assert isinstance(attempt(Worker(), divide, 3, 0).error, ZeroDivisionError)


def test_a_method_of_the_worker_is_called_by_its_name():
    worker = Worker()
    assert attempt(worker, "start_weight_update") is None
    assert worker.calls == ["start"]


def test_an_error_that_would_not_arrive_is_told_in_words():
    error = attempt(Worker(), fail_with_two).error
    with pytest.raises(RuntimeError, match=r"NeedsTwoError\('1 and 2'\)"):
        raise pickle.loads(pickle.dumps(error))


class Llm:
    """Calls its workers as vLLM does, or has lost one."""

    def __init__(self, workers, *, is_idle=True):
        self.workers, self._is_idle = workers, is_idle
        self.llm_engine = self
        self.version = ""

    def set_weight_version(self, version):
        self.version = version

    def reset_prefix_cache(self):
        return self._is_idle

    def collective_rpc(self, function, args):
        if None in self.workers:
            raise OSError("a worker is gone")
        return [function(worker, *args) for worker in self.workers]


def rank_below(worker, limit):
    if worker >= limit:
        raise IndexError(worker)
    return worker


def test_all_answers_are_taken_before_the_first_error_is_raised():
    assert on_workers(Llm([0, 1, 2]), rank_below, 3) == [0, 1, 2]
    with pytest.raises(IndexError, match="1"):
        on_workers(Llm([0, 1, 2]), rank_below, 1)
    with pytest.raises(RuntimeError, match=r"not all of vLLM's workers are alive.*is gone"):
        on_workers(Llm([0, None]), rank_below, 2)


def test_a_cache_that_stays_fails_the_update():
    llm = Llm([Worker(), Worker()])
    finish_update(llm, 3)
    assert [worker.calls for worker in llm.workers] == [["finish"]] * 2
    assert llm.version == "3"
    with pytest.raises(RefitError, match="requests are running"):
        finish_update(Llm([Worker()], is_idle=False), 3)
