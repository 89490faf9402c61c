import pytest
from rl_policy import weight_transfer

GIB = 2**30


@pytest.mark.parametrize(
    ("num_receivers", "world_size", "is_paired", "expected"),
    [
        (2, 2, True, [1, 1]),
        (2, 2, False, [2, 0]),
        (1, 2, True, [1, 0]),
        (3, 2, True, [3, 0]),
        (1, 1, False, [1]),
    ],
)
def test_who_sends_to_whom(num_receivers, world_size, is_paired, expected):
    receivers = weight_transfer.receivers_per_rank(
        num_receivers, world_size=world_size, is_paired=is_paired
    )
    assert receivers == expected
    addresses = [{"endpoint": str(rank)} if count else None for rank, count in enumerate(expected)]
    found = weight_transfer.address_per_receiver(addresses, receivers)
    assert len(found) == num_receivers
    if expected == [1, 1]:
        assert [address["endpoint"] for address in found] == ["0", "1"]


def test_nobody_to_send_to_is_an_error():
    with pytest.raises(ValueError, match="num_receivers=0"):
        weight_transfer.receivers_per_rank(0, world_size=2, is_paired=False)


def report(seconds, load, slowest=None):
    numbers = {"refit_s": seconds, "refit_load_s": load, "refit_bytes": 8e9, "refit_gb_per_s": 0.0}
    return numbers if slowest is None else numbers | {"refit_slowest_rank": slowest}


def test_a_report_is_that_of_the_slowest_sender():
    merged = weight_transfer.merge_reports([report(2.0, 1.5, 0), report(4.0, 1.0, 1)], [1, 1])
    assert merged == {
        "refit_s": 4.0,
        "refit_load_s": 1.5,
        "refit_bytes": 8e9,
        "refit_gb_per_s": 2.0,
        "refit_slowest_rank": 1,
    }


def test_ranks_that_only_gather_do_not_count():
    merged = weight_transfer.merge_reports([report(2.0, 1.5, 1), report(9.0, 0.0)], [2, 0])
    assert (merged["refit_s"], merged["refit_slowest_rank"]) == (2.0, 1)


def test_groups_fit_the_buffer_or_the_smallest_memory():
    sizes = [("a", GIB), ("b", GIB // 2), ("c", 3 * GIB), ("d", 1)]
    answers = [(sizes, 8.0 * GIB), (sizes, 1.5 * GIB)]
    by_memory = weight_transfer.group_for_ipc(answers, limit_gib=None)
    assert by_memory == [["a", "b"], ["c"], ["d"]]
    assert weight_transfer.group_for_ipc(answers, limit_gib=1) == [["a"], ["b"], ["c"], ["d"]]
    assert weight_transfer.group_for_ipc(answers, limit_gib=100) == [["a", "b", "c", "d"]]
    with pytest.raises(ValueError, match="_refit_buffer_size_gb=0"):
        weight_transfer.group_for_ipc(answers, limit_gib=0)
