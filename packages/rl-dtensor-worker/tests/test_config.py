import warnings

import pytest
import torch
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.config import EngineConfig
from rl_dtensor_worker.parallel.mesh import choose_sharding
from rl_interfaces import ParallelLayout
from tiny_model import make_config

pytestmark = pytest.mark.promise


def _section(**values):
    return {"dtensor_cfg": {"enabled": True} | values}


_OPTIMIZER = "torch.optim.AdamW"
_SCHEDULES = "torch.optim.lr_scheduler"
_SCHEDULE = f"{_SCHEDULES}.LinearLR"
_ONE_CYCLE = f"{_SCHEDULES}.OneCycleLR"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_section(tensor_parallel_size=3), ["tensor_parallel_size=3", "world_size=4"]),
        (
            _section(tensor_parallel_size=2, context_parallel_size=4),
            ["tensor_parallel_size=2", "context_parallel_size=4", "world_size=4"],
        ),
        (
            _section(tensor_parallel_size=2, custom_parallel_plan="plans_for_tests.ATTENTION"),
            ["tensor_parallel_size=2", "num_key_value_heads=1"],
        ),
        (
            _section(context_parallel_size=2, data_parallel_replicate_size=4),
            ["data_parallel_replicate_size=4", "2 data-parallel ranks"],
        ),
        (
            _section(tensor_parallel_size=2, custom_parallel_plan="nowhere.PLAN"),
            ["custom_parallel_plan='nowhere.PLAN'", "nowhere"],
        ),
        (
            _section(tensor_parallel_size=2, custom_parallel_plan="torch.pi"),
            ["custom_parallel_plan='torch.pi'", "float, not a dict"],
        ),
        (_section(context_parallel_size=0), ["context_parallel_size=0", "at least 1"]),
        (_section(custom_parallel_plan="a.b"), ["custom_parallel_plan='a.b'"]),
        (
            {"head": "reward", **_section(tensor_parallel_size=2, sequence_parallel=True)},
            ["policy.head='reward'", "sequence_parallel=True"],
        ),
        ({"train_global_batch_size": 6}, ["train_global_batch_size=6", "4 data-parallel"]),
        ({"optimizer": None}, ["policy.optimizer is not set"]),
        ({"optimizer": {"name": "torch.optim.Adamm"}}, ["policy.optimizer.name", "Adamm"]),
        ({"optimizer": {"name": "torch.nn.Linear"}}, ["torch.nn.Linear", "Optimizer"]),
        ({"optimizer": {"name": "AdamW"}}, ["policy.optimizer.name='AdamW'"]),
        (
            {"optimizer": {"name": _OPTIMIZER, "kwargs": {"lrr": 1.0}}},
            ["policy.optimizer.kwargs", "lrr"],
        ),
        ({"scheduler": {"name": _SCHEDULE, "kwargs": {"speed": 1}}}, ["policy.scheduler", "speed"]),
        *[
            ({"optimizer": {"name": _OPTIMIZER, "kwargs": {key: value}}}, [f"kwargs.{key}", word])
            for key, value, word in [
                ("lr", float("nan"), "=nan must be finite"),
                ("lr", float("inf"), "=inf must be finite"),
                ("lr", -1, "=-1 is refused by torch.optim.AdamW"),
                ("lr", "abc", "='abc' is refused by torch.optim.AdamW"),
                ("lr", None, "=None is refused by torch.optim.AdamW"),
                ("weight_decay", "abc", "must be float, got str 'abc'"),
                ("betas", [2, 3], "=[2, 3] is refused by torch.optim.AdamW"),
                ("betas", [0.9, float("nan")], "[1]=nan must be finite"),
                ("betas", 3, "=3 is refused by torch.optim.AdamW"),
                ("eps", -1, "=-1 is refused by torch.optim.AdamW"),
                ("fused", "maybe", "must be bool or None, got str 'maybe'"),
            ]
        ],
        *[
            (
                {"optimizer": {"name": f"torch.optim.{name}"}},
                [name, "cannot train"],
            )
            for name in ("LBFGS", "SparseAdam")
        ],
        ({"optimizer": {"name": "torch.optim.Muon"}}, ["policy.optimizer.kwargs", "Muon"]),
        *[
            (
                {"scheduler": {"name": f"{_SCHEDULES}.{name}", "kwargs": kwargs}},
                ["policy.scheduler", word],
            )
            for name, kwargs, word in [
                ("LinearLR", {"start_factor": 0}, "policy.scheduler.kwargs={'start_factor': 0}"),
                ("LinearLR", {"total_iters": "abc"}, "total_iters must be int, got str 'abc'"),
                ("CosineAnnealingLR", {"T_max": 0}, "ZeroDivisionError"),
                ("StepLR", {"step_size": 0}, "ZeroDivisionError"),
                ("StepLR", {"step_size": 1, "gamma": -1}, "rate after 1 steps is -"),
                ("ExponentialLR", {"gamma": float("inf")}, "gamma=inf must be finite"),
                ("LambdaLR", {"lr_lambda": 3}, "not callable"),
                ("OneCycleLR", {"max_lr": 1}, "total_steps"),
                ("ReduceLROnPlateau", {}, "metrics"),
            ]
        ],
        (
            {
                "scheduler": [
                    {"name": _ONE_CYCLE, "kwargs": {"max_lr": 1.0, "total_steps": 4}},
                    {"name": _SCHEDULE},
                    {"milestones": [9]},
                ]
            },
            ["policy.scheduler[0].kwargs", "OneCycleLR", "Tried to step"],
        ),
        (
            {"scheduler": [{"name": _SCHEDULE}, {"name": _SCHEDULE}]},
            ["2 schedulers", "1 milestones"],
        ),
        (
            {
                "scheduler": [
                    {"name": _SCHEDULE},
                    {"name": _SCHEDULE},
                    {"name": _SCHEDULE},
                    {"milestones": [5, 3]},
                ]
            },
            ["[5, 3]", "rise"],
        ),
        ({"model_name": "/nowhere/at/all"}, ["policy.model_name", "/nowhere/at/all"]),
        (
            {"sequence_packing": {"enabled": True, "train_mb_tokens": 8}},
            ["policy.sequence_packing.logprob_mb_tokens", "not set"],
        ),
        ({"max_total_sequence_length": 7}, ["max_new_tokens=8", "max_total_sequence_length=7"]),
    ],
)
def test_a_wrong_config_is_named_before_anything_starts(tiny_model, change, words):
    config = make_config(tiny_model) | change
    with pytest.raises(ValueError, match=r".") as error:
        DTensorPolicyWorker.validate_config(config, world_size=4)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_layout_of_a_good_config(tiny_model):
    layout = DTensorPolicyWorker.validate_config(make_config(tiny_model), world_size=4)
    assert (layout.data_parallel, layout.world_size) == (4, 4)


def test_learning_rate_stands_in_for_the_kwargs(tiny_model):
    optimizer = {"name": _OPTIMIZER, "kwargs": {}}
    given = make_config(tiny_model, learning_rate=3e-4, optimizer=optimizer)
    config = EngineConfig.from_policy_config(given, world_size=1, init_optimizer=True)
    assert config.optimizer is not None
    assert config.optimizer.cls is torch.optim.AdamW
    assert config.optimizer.kwargs == {"lr": 3e-4}


def test_an_optimizer_is_not_needed_where_none_is_wanted(tiny_model):
    config = make_config(tiny_model, optimizer=None)
    DTensorPolicyWorker.validate_config(config, world_size=1, init_optimizer=False)


@pytest.mark.parametrize(
    ("data_parallel", "tensor_parallel", "millions", "replicas"),
    # 16 bytes of training state a parameter, up to 256 MiB on a rank.
    [(4, 1, 16, 4), (4, 1, 17, 1), (2, 2, 33, 2), (2, 2, 34, 1), (1, 1, 1, 1)],
)
def test_a_small_model_is_replicated(caplog, data_parallel, tensor_parallel, millions, replicas):
    layout = ParallelLayout(data_parallel=data_parallel, tensor_parallel=tensor_parallel)
    with caplog.at_level("INFO", logger="rl_dtensor_worker"):
        choice = choose_sharding(layout, replicas="auto", num_parameters=millions * 10**6)
    assert choice.replicas == replicas
    said = f"MiB: {replicas} data-parallel ranks have a copy each"
    assert (said in caplog.text) == (replicas > 1)


@pytest.mark.parametrize(("millions", "is_small"), [(16, True), (17, False)])
def test_a_small_model_is_gathered_at_once(caplog, millions, is_small):
    layout = ParallelLayout(data_parallel=4, tensor_parallel=1)
    with caplog.at_level("INFO", logger="rl_dtensor_worker"):
        choice = choose_sharding(layout, replicas=2, num_parameters=millions * 10**6)
    assert (choice.replicas, choice.is_small) == (2, is_small)
    assert ("sharded over 2 ranks and gathered at once" in caplog.text) == is_small


def test_what_is_accepted_is_accepted_without_a_warning(tiny_model):
    torch.set_warn_always(True)  # torch gives some of its warnings once per process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DTensorPolicyWorker.validate_config(make_config(tiny_model), world_size=1)
    finally:
        torch.set_warn_always(False)
