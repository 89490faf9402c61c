import torch
from rl_interfaces.backend.engine import module_mode


def test_every_module_is_in_the_mode_though_the_model_is_already():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1)).eval()
    model[0].train()
    with module_mode([model], training=False):
        assert not any(module.training for module in model.modules())


def test_a_model_is_left_in_the_mode_that_it_had():
    trained, idle = torch.nn.Linear(1, 1).train(), torch.nn.Linear(1, 1).eval()
    with module_mode([trained, idle], training=False):
        assert not trained.training
        assert not idle.training
    assert trained.training
    assert not idle.training
