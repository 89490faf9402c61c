"""What the tests of all packages have in common."""

import atexit
import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Modules that the tests of all packages share. The processes that tests start import them, too.
SHARED = str(Path(__file__).parent / "checks" / "testing")
sys.path.insert(0, SHARED)
os.environ["PYTHONPATH"] = os.pathsep.join([SHARED, *filter(None, [os.environ.get("PYTHONPATH")])])

# Property tests have no deadline, as other work may share the processor. `uv run nox` tries fewer
# examples.
settings.register_profile("full", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full"))

# Tensors of tests are tiny, and other tests run beside them: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests talk to this machine alone: a name of a model that is not there is not looked up.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Until all tests are imported: modules are objects by the hundred thousand and none is garbage, so
# to look for some among them again and again takes a fifth of the time of importing torch.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of sessions that run slow tests, after others have run the fast ones."""
    parser.addoption(
        "--sample-fast",
        action="store_true",
        help="of the tests that are not slow, run the first of each file that has no slow one",
    )


def pytest_configure() -> None:
    """Give each process of tests its own Ray, as several run in parallel, and a file of stacks."""
    import stacks

    stacks.open_file()
    if "RAY_TMPDIR" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        # Short, as sockets lie below it. It goes with the process.
        directory = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        os.environ["RAY_TMPDIR"] = directory.name
        atexit.register(directory.cleanup)


# Not `pytest_collection_finish`, which the process that starts others of pytest-xdist lacks.
@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect garbage from here on, but none of what has been imported, nor in forked ranks."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# An environment may lack pytest-timeout.
@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    """Report the stacks of all processes of a test that takes too long."""
    import stacks

    started = yield
    stacks.on_timeout(item)
    return started


# Around pytest's own, which reads `-m`.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Mark cases of parametrised tests, and leave out what `--sample-fast` does."""
    mark_cases(items)
    yield
    if config.getoption("sample_fast"):
        fast = [item for item in items if not item.get_closest_marker("slow")]
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        firsts = {item.path: item for item in reversed(fast) if item.path not in slow}
        dropped = {item for item in fast if item is not firsts.get(item.path)}
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def mark_cases(items: list[pytest.Item]) -> None:
    """Mark the cases of parametrised tests as `slow_beyond` and `promise_first` say."""
    num_cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        index = num_cases[test]
        num_cases[test] += 1
        beyond, first = map(item.get_closest_marker, ("slow_beyond", "promise_first"))
        if beyond is not None and not is_among(index, *beyond.args, **beyond.kwargs):
            item.add_marker("slow")
        if first is not None and is_among(index, *first.args, **first.kwargs):
            item.add_marker("promise")


def is_among(index: int, count: int, every: int = 1) -> bool:
    """Return whether a case is one of the first `count`, taking each `every`-th case."""
    turn, rest = divmod(index, every)
    return not rest and turn < count
