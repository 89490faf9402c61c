import itertools

import pytest
from rl_interfaces import Residency, ResidencyError, ResidencyState

pytestmark = pytest.mark.promise

STATES = ["training", "inference", "refitting", "offloaded"]
LEADS_TO = {
    "prepare_for_training": "training",
    "prepare_for_lp_inference": "inference",
    "offload_before_refit": "refitting",
    "offload_after_refit": "offloaded",
}
ON_DEVICE = {"training", "inference", "refitting"}
ALLOWED = {
    "train": {"training"},
    "train(eval_mode=True)": {"training", "inference"},
    "forward_backward": {"training"},
    "load_checkpoint": set(STATES),
    "get_logprobs": ON_DEVICE,
    "get_reference_policy_logprobs": ON_DEVICE,
    "generate": ON_DEVICE,
    "get_topk_logits": ON_DEVICE,
    "score": ON_DEVICE,
    "send_weights": ON_DEVICE,
}


EVERY_CALL = list(itertools.product(STATES, ALLOWED))
REFUSED = [(state, call) for state, call in EVERY_CALL if state not in ALLOWED[call]]


def residency_in(state):
    residency = Residency(has_optimizer=True)
    (way,) = [call for call, target in LEADS_TO.items() if target == state]
    residency.enter(way)
    return residency


@pytest.mark.parametrize(("has_optimizer", "state"), [(True, "training"), (False, "inference")])
def test_a_worker_starts_where_its_optimizer_says(has_optimizer, state):
    assert Residency(has_optimizer=has_optimizer).state is ResidencyState(state)


@pytest.mark.parametrize(("state", "call"), list(itertools.product(STATES, LEADS_TO)))
def test_a_move_is_allowed_in_every_state(state, call):
    residency = residency_in(state)
    assert residency.enter(call) is ResidencyState(LEADS_TO[call])
    assert residency.state is ResidencyState(LEADS_TO[call])


@pytest.mark.parametrize(("state", "call"), EVERY_CALL)
def test_the_table_of_calls(state, call):
    residency = residency_in(state)
    if state in ALLOWED[call]:
        residency.require(call)
    else:
        with pytest.raises(ResidencyError) as raised:
            residency.require(call)
        message = str(raised.value)
        assert message.startswith(f"{call} is not allowed while the worker is '{state}': call ")
    assert residency.state is ResidencyState(state)


@pytest.mark.parametrize(("state", "call"), REFUSED)
def test_the_way_out_that_an_error_names_leads_out(state, call):
    residency = residency_in(state)
    with pytest.raises(ResidencyError) as raised:
        residency.require(call)
    ways = [way for way in LEADS_TO if f"{way}()" in str(raised.value)]
    assert ways
    for way in ways:
        residency.enter(way)
        residency.require(call)


def test_the_states_are_those_of_the_table():
    assert [state.value for state in ResidencyState] == STATES


LOSE_GRADIENTS = {"train", "load_checkpoint", *LEADS_TO} - {"prepare_for_training"}


@pytest.mark.parametrize("call", [*ALLOWED, *LEADS_TO])
def test_what_would_lose_pending_gradients_is_refused(call):
    residency = residency_in("training")
    residency.has_gradients = True
    if call in LOSE_GRADIENTS:
        with pytest.raises(ResidencyError, match=rf"^{call} is not .*call optimizer_step\(\) or"):
            residency.require(call)
    else:
        residency.require(call)
    residency.has_gradients = False
    residency.require(call)


def test_an_optimizer_step_needs_gradients():
    residency = residency_in("training")
    with pytest.raises(ResidencyError, match=r"needs gradients: call forward_backward\(\) first"):
        residency.require("optimizer_step")
    residency.has_gradients = True
    residency.require("optimizer_step")
