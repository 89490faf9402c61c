import pytest
from rl_interfaces import ColocatablePolicyInterface, GenerationInterface, PolicyInterface

pytestmark = pytest.mark.promise

POLICY = {
    "get_logprobs",
    "get_reference_policy_logprobs",
    "train",
    "prepare_for_training",
    "finish_training",
    "save_checkpoint",
    "shutdown",
}
COLOCATABLE = {
    "init_collective",
    "offload_before_refit",
    "offload_after_refit",
    "prepare_refit_info",
    "prepare_weights_for_ipc",
    "get_weights_ipc_handles",
    "prepare_info_for_collective",
    "broadcast_weights_for_collective",
}
GENERATION = {"generate", "prepare_for_generation", "finish_generation"}


@pytest.mark.parametrize(
    ("interface", "methods"),
    [
        (PolicyInterface, POLICY),
        (ColocatablePolicyInterface, POLICY | COLOCATABLE),
        (GenerationInterface, GENERATION),
    ],
)
def test_an_implementation_has_to_give_every_method(interface, methods):
    given = {name: lambda self: None for name in methods}
    assert isinstance(type("Complete", (interface,), given)(), interface)
    for missing in methods:
        rest = {name: method for name, method in given.items() if name != missing}
        with pytest.raises(TypeError, match=missing):
            type("Partial", (interface,), rest)()


def test_a_policy_can_be_a_generation_engine_too():
    names = POLICY | COLOCATABLE | GENERATION
    bases = (ColocatablePolicyInterface, GenerationInterface)
    policy = type("Both", bases, {name: lambda self: None for name in names})()
    assert isinstance(policy, PolicyInterface)
    assert isinstance(policy, GenerationInterface)
