"""The worker's end of a refit, with receivers of rl-refit beside it."""

import pytest
import weights_ranks
from rl_interfaces.backend.runtime import ReservedPort
from tiny_model import make_config


@pytest.mark.slow_beyond(3, every=4)
@pytest.mark.parametrize("transport", ["shm", "collective", "golden"])
@pytest.mark.parametrize(("num_ranks", "pairs"), [(1, True), (2, True), (2, False)])
@pytest.mark.promise_first(2)
def test_receivers_get_the_weights_of_each_version(pools, tiny_model, transport, num_ranks, pairs):
    ranks = pools(num_ranks).run(
        weights_ranks.stream_weights,
        config=make_config(tiny_model),
        transport=transport,
        pairs=pairs,
    )
    assert sum(each.num_receivers for seen in ranks for each in seen) == 2 * num_ranks
    for seen in ranks:
        assert [each.is_same for each in seen] == [True, True]
        for each in seen:
            assert each.report["refit_bytes"] > 0
            assert each.report["refit_s"] >= each.report["refit_gather_s"] > 0


def test_a_group_that_the_driver_names_gets_the_weights(pools, tiny_model):
    config = make_config(tiny_model)
    with ReservedPort() as port:
        received = pools(2).run(weights_ranks.broadcast_weights, config=config, port=port.number)
    assert received == [[True, True], []]


def test_transfers_in_the_wrong_state_say_what_is_missing(pools, tiny_model):
    (errors,) = pools(1).run(
        weights_ranks.transfers_in_wrong_states, config=make_config(tiny_model)
    )
    assert errors[:4] == [
        "RuntimeError: no refit is open: call open_refit() first",
        "RuntimeError: there is no broadcast group: call init_collective() first",
        "ValueError: there is no tensor 'no such tensor' in the model",
        "allowed",
    ]
    assert all("offloaded" in error and "offload_before_refit" in error for error in errors[4:])
