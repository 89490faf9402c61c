"""The fake CUDA device: what it counts, and that it finds a bug of each kind."""

from pathlib import Path

import pytest
from rl_interfaces.testing.fake_cuda import (
    exceeded,
    fake_cuda,
    load,
    problems,
    read_limits,
    run_on_fake_cuda,
    why_unavailable,
)

_TESTS = Path(__file__).parent
_BLOCK = 512

pytestmark = pytest.mark.needs("rl-interfaces[testing]")
needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture(scope="module")
def found():
    """The results of all functions of `fake_cuda_checks`, from one process."""
    return run_on_fake_cuda("fake_cuda_checks:everything", path=[_TESTS])


@needs_compiler
def test_mixtures_of_devices_raise(found):
    mixtures = found["mixtures"]
    for way in ("operator", "foreach", "collective", "index"):
        assert mixtures[way] is not None, way
        assert "cpu" in mixtures[way], way
        assert "cuda:0" in mixtures[way], way
    assert mixtures["scalar"] is None


@needs_compiler
def test_waits_of_the_host_are_counted_by_kind(found):
    kinds = found["waits"]["kinds"]
    for name in ("item", "float", "bool", "tolist", "cpu", "copy to host"):
        assert kinds[name] == ["read"], name
    for name in ("upload", "tensor", "set an element"):
        assert kinds[name] == ["upload"], name
    for name in ("mask", "nonzero"):
        assert kinds[name] == ["shape"], name
    for name in ("synchronize", "event", "empty_cache"):
        assert kinds[name] == ["synchronize"], name
    for name in ("asynchronous upload", "asynchronous copy", "fill under a mask", "compute"):
        assert kinds[name] == [], name


@needs_compiler
def test_offloads_wait_once_and_use_the_same_memory(found):
    offloads = found["offloads"]
    assert offloads["waits"] == [[1, 0], [1, 0]]  # to the host, and back
    first, second = offloads["places"]
    assert first == second
    # 48, 120, 0 and 56 bytes, each from a multiple of 64 on, in a power of two.
    assert offloads["num_bytes"] == 256


@needs_compiler
def test_a_wait_has_its_line(found):
    ((place, count),) = found["waits"]["places"].items()
    assert count == 2
    lines = (_TESTS / "fake_cuda_checks.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.strip() == "value.item()")
    assert place == f"tests/fake_cuda_checks.py:{line} read_twice (read)"


@needs_compiler
def test_launches_are_those_of_kernels_on_the_device(found):
    assert found["launches"] == [0, 3, 0]


@needs_compiler
def test_bytes_are_those_of_storages_in_blocks(found):
    memory = found["memory"]
    assert memory["view holds all"] == [8 * _BLOCK, 9 * _BLOCK]
    (line,) = memory["named"]
    assert line.startswith(f"{8 * _BLOCK} bytes, torch.float32 [1000], from ")
    assert (memory["freed"], memory["resized"], memory["resized back"]) == (0, 0, 4096)


@needs_compiler
def test_moves_to_the_device_and_back_are_followed(found):
    moves, model = found["moves"], (256 * 256 + 256) * 4
    assert moves["module to cuda"] == moves["data to cuda"] == model
    assert moves["devices"] == ["cuda:0"]
    # Gradients and both moments of Adam.
    assert moves["trained"] == 4 * model
    assert moves["module to cpu"] == moves["data to cpu"] == 0
    assert moves["real data to cuda"] == ["cuda:0", [1.0] * 4]


@needs_compiler
def test_integers_are_real_and_unknown_floats_zero(found):
    assert found["values"] == {
        "integers": [4, 10],
        "selected": [[1]],
        "unknown float": 0.0,
        "finite": True,
        "drawn": [0],
    }


@needs_compiler
def test_collectives_repeat_what_this_rank_has(found):
    assert found["collectives"] == {
        "rank": [1, 4, 1],
        "gathered": [5, 5, 5, 5],
        "summed": [5],
        "reduced": [6],
        "received": [9],
        "objects": ["same"] * 4,
    }


@needs_compiler
def test_attention_takes_the_bytes_of_the_kernel_that_cuda_would_choose(found):
    peaks = found["attention_bytes"]
    scores = 4 * 2048 * 2048 * 2
    for name in ("causal", "grouped", "lower right"):
        assert peaks[name] < scores / 8, name
    assert peaks["grouped with a mask"] > scores


@needs_compiler
@pytest.mark.parametrize(
    ("bug", "number"),
    [
        ("wait", "syncs_per_layer"),
        ("launches", "launches_per_layer"),
        ("bytes", "peak_bytes.train"),
        ("kept", "offloaded_bytes"),
    ],
)
def test_a_planted_bug_exceeds_the_numbers_without_it(found, bug, number):
    limits = {"toy": found["planted"]["None"]}
    assert exceeded("toy", found["planted"]["None"], limits) == []
    lines = exceeded("toy", found["planted"][bug], limits)
    assert any(f"[toy] {number} is " in line for line in lines), lines


@needs_compiler
def test_a_failure_in_the_process_is_raised_here():
    with pytest.raises(AssertionError, match="ValueError: on purpose"):
        run_on_fake_cuda("fake_cuda_checks:fail", path=[_TESTS])


def test_it_refuses_a_process_that_has_imported_torch():
    with pytest.raises(RuntimeError, match="before torch is imported"):
        load()
    with pytest.raises(RuntimeError, match="is not loaded"), fake_cuda():
        pass


def test_without_a_compiler_the_reason_names_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "needs a C++ compiler" in str(why_unavailable())


NUMBERS = {
    "launches_per_layer": 10,
    "syncs_per_layer": 0,
    "offloaded_bytes": 0,
    "peak_bytes": {"train_again": 4096},
    "syncs": {"engine.py step (read)": 1},
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"launches_per_layer": 9}, None),
        ({"syncs": {}}, None),
        ({"launches_per_layer": 10.5}, "[tp2] launches_per_layer is 10.5, its maximum 10"),
        ({"offloaded_bytes": 512}, "[tp2] offloaded_bytes is 512, its maximum 0"),
        ({"peak_bytes": {"train_again": 4608}}, "peak_bytes.train_again is 4608, its maximum 4096"),
        ({"peak_bytes": {"generate": 1}}, "peak_bytes.generate is 1, its maximum missing"),
        ({"syncs": {"loss.py loss (read)": 1}}, "syncs.'loss.py loss (read)' is 1, its maximum 0"),
    ],
)
def test_numbers_above_the_list_are_named(change, line):
    lines = exceeded("tp2", {**NUMBERS, **change}, {"tp2": NUMBERS})
    assert lines == [] if line is None else len(lines) == 1
    assert line is None or line in lines[0]


def test_a_case_without_maxima_is_named():
    (line,) = exceeded("cp2", NUMBERS, {"tp2": NUMBERS})
    assert line.startswith("[cp2] is not in the list of maxima")


# Of two steps of a micro-batch each: seven waits are the aim.
LIFE = {**NUMBERS, "syncs": {"a": 7}, "num_passes": 2, "moves": ["b"], "left": [], "lines": []}


@pytest.mark.parametrize(
    ("change", "told", "without_aim"),
    [
        ({}, [], []),
        ({"syncs": {"a": 8}}, ["8 waits in 2 steps of 2 micro-batches, at most 7"], []),
        ({"syncs_per_layer": 1}, ["1 in a layer, none allowed"], []),
        ({"moves": ["b", "b"]}, ["moving waits 2 times"], []),
        ({"offloaded_bytes": 4, "left": ["c"]}, ["left after an offload: ['c']"], None),
    ],
)
def test_what_misses_the_aim_is_told_though_the_list_allows_it(change, told, without_aim):
    life = {**LIFE, **change}
    options = {"num_steps": 2, "most_moving_waits": 1}
    found = problems("tp2", life, {"tp2": life}, **options)
    without = problems("tp2", life, {"tp2": life}, **options, has_aim=False)
    assert len(found) == len(told)
    assert all(text in line for text, line in zip(told, found, strict=True))
    assert without == (found if without_aim is None else without_aim)


def test_a_list_with_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text("[tp2]\nlaunches_per_layer = 1\nlaunch = 2\n")
    with pytest.raises(ValueError, match=r"limits\.toml \[tp2\]"):
        read_limits(path)
