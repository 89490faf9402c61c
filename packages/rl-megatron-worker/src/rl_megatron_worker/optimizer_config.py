"""Parsing of the sections `optimizer` and `scheduler`, Megatron-core's own or torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_interfaces.config.resolve import MEGATRON_DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

_PATH = "policy.megatron_cfg.optimizer"
# Megatron-core's counterparts of torch's optimizers.
_TORCH_OPTIMIZERS = {
    "torch.optim.AdamW": {"optimizer": "adam", "decoupled": True},
    "torch.optim.Adam": {"optimizer": "adam", "decoupled": False},
    "torch.optim.SGD": {"optimizer": "sgd", "decoupled": False},
}
_TORCH_DEFAULTS = {
    "torch.optim.AdamW": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "torch.optim.Adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "torch.optim.SGD": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
}
# Flags of the section that duplicate `policy.precision` and have to agree with it.
_PRECISION_OF_FLAG = {"bf16": "bfloat16", "fp16": "float16"}
_RATE_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """Settings of the optimizer."""

    kind: str
    """`adam` or `sgd`."""
    lr: float
    min_lr: float
    weight_decay: float
    decoupled_weight_decay: bool
    """Whether weight decay is decoupled, as in AdamW."""
    adam_betas: tuple[float, float]
    adam_eps: float
    sgd_momentum: float
    is_distributed: bool
    """Whether its state is sharded over the data-parallel ranks."""
    max_grad_norm: float | None
    """Gradients are clipped to this norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSettings:
    """Schedules of learning rate and weight decay; a step is a `train` call."""

    lr_decay_style: str
    lr_decay_steps: int
    lr_warmup_steps: int
    lr_warmup_init: float
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str


def parse_optimizer(resolved: Mapping[str, Any]) -> OptimizerSettings:
    """Return the optimizer of a resolved policy config.

    Without `policy.megatron_cfg.optimizer`, `policy.optimizer` is translated.

    Raises:
        ValueError: A setting is invalid; the message names keys and values.
    """
    given = resolved["megatron_cfg"].get("optimizer")
    decoupled = True
    if given is None:
        given, decoupled = _from_torch(resolved)
    if "lr" not in given:
        raise ValueError(f"{_PATH}.lr is not set: the learning rate")
    if given["optimizer"] not in ("adam", "sgd"):
        raise ValueError(f"{_PATH}.optimizer={given['optimizer']!r} must be 'adam' or 'sgd'")
    if given["optimizer"] == "sgd" and given["use_distributed_optimizer"]:
        raise ValueError(f"{_PATH}.use_distributed_optimizer=True needs {_PATH}.optimizer='adam'")
    if not given["min_lr"] <= given["lr"]:
        raise ValueError(f"{_PATH}.min_lr={given['min_lr']} must not be above lr={given['lr']}")
    _check_precision(given, resolved["precision"])
    if given["use_precision_aware_optimizer"]:
        raise ValueError(
            f"{_PATH}.use_precision_aware_optimizer=True: its float32 weights are inside "
            "Transformer Engine's optimizer, where Megatron-core does not update them when weights "
            f"are loaded; set {_PATH}.use_distributed_optimizer=True to save memory"
        )
    return OptimizerSettings(
        kind=given["optimizer"],
        lr=given["lr"],
        min_lr=given["min_lr"],
        weight_decay=given["weight_decay"],
        decoupled_weight_decay=decoupled,
        adam_betas=(given["adam_beta1"], given["adam_beta2"]),
        adam_eps=given["adam_eps"],
        sgd_momentum=given["sgd_momentum"],
        is_distributed=given["use_distributed_optimizer"],
        max_grad_norm=_max_grad_norm(given, resolved),
    )


def parse_scheduler(
    resolved: Mapping[str, Any], optimizer: OptimizerSettings | None
) -> SchedulerSettings:
    """Return the schedule of a resolved policy config; without one all rates are constant.

    Args:
        resolved: The config.
        optimizer: Its weight decay is the default of the schedule.

    Raises:
        ValueError: A setting is invalid; the message names keys and values.
    """
    if "scheduler" in resolved:
        raise ValueError(
            "policy.scheduler configures torch's schedulers: with policy.megatron_cfg.enabled=True "
            "set policy.megatron_cfg.scheduler"
        )
    given = resolved["megatron_cfg"].get("scheduler", MEGATRON_DEFAULTS["scheduler"])
    path = "policy.megatron_cfg.scheduler"
    style, decay_style = given["lr_decay_style"], given["weight_decay_incr_style"]
    for key, value, choices in (
        ("lr_decay_style", style, _RATE_STYLES),
        ("weight_decay_incr_style", decay_style, _DECAY_STYLES),
    ):
        if value not in choices:
            raise ValueError(f"{path}.{key}={value!r} must be one of {choices}")
    warmup, decay = given["lr_warmup_iters"], given.get("lr_decay_iters")
    if decay is None and (style != "constant" or decay_style != "constant"):
        raise ValueError(
            f"{path}.lr_decay_iters is not set: the `train` calls of lr_decay_style={style!r} and "
            f"weight_decay_incr_style={decay_style!r}"
        )
    # Megatron-core needs a number of decay steps for a constant rate too.
    decay = warmup + 1 if decay is None else decay
    if not 0 <= warmup < decay:
        raise ValueError(f"{path}.lr_warmup_iters={warmup} must be below lr_decay_iters={decay}")
    if optimizer is not None and given["lr_warmup_init"] > optimizer.lr:
        raise ValueError(
            f"{path}.lr_warmup_init={given['lr_warmup_init']} must not be above "
            f"{_PATH}.lr={optimizer.lr}"
        )
    own = 0.0 if optimizer is None else optimizer.weight_decay
    start, end = _weight_decays(given, own, path=path)
    return SchedulerSettings(
        lr_decay_style=style,
        lr_decay_steps=decay,
        lr_warmup_steps=warmup,
        lr_warmup_init=given["lr_warmup_init"],
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_style=decay_style,
    )


def _weight_decays(given: Mapping[str, Any], own: float, *, path: str) -> tuple[float, float]:
    start = given.get("start_weight_decay", own)
    end = given.get("end_weight_decay", start)
    if given["weight_decay_incr_style"] == "constant" and start != end:
        raise ValueError(
            f"{path}.start_weight_decay={start} and end_weight_decay={end} contradict "
            "weight_decay_incr_style='constant'"
        )
    if not 0 <= start <= end:
        raise ValueError(f"{path}.start_weight_decay={start} must be in 0..end_weight_decay={end}")
    return start, end


def _from_torch(resolved: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return `policy.optimizer` as Megatron-core's keys, and whether its decay is decoupled."""
    given = resolved.get("optimizer")
    if given is None:
        raise ValueError(
            f"{_PATH} is not set, nor is policy.optimizer, and init_optimizer=True needs one: give "
            "{optimizer: adam, lr: ...}, or pass init_optimizer=False"
        )
    name = given.get("name")
    if name not in _TORCH_OPTIMIZERS:
        raise ValueError(
            f"policy.optimizer.name={name!r} has no counterpart in Megatron-core (supported: "
            f"{', '.join(_TORCH_OPTIMIZERS)}): set {_PATH}"
        )
    defaults = _TORCH_DEFAULTS[name]
    kwargs = given.get("kwargs", {})
    if unknown := sorted(kwargs.keys() - defaults.keys()):
        raise ValueError(
            f"policy.optimizer.kwargs.{unknown[0]}={kwargs[unknown[0]]!r} has no counterpart in "
            f"Megatron-core (supported: {', '.join(defaults)}): set {_PATH}"
        )
    arguments = defaults | kwargs
    translated = MEGATRON_DEFAULTS["optimizer"] | {
        "optimizer": _TORCH_OPTIMIZERS[name]["optimizer"],
        "lr": arguments["lr"],
        "weight_decay": arguments["weight_decay"],
    }
    if "betas" in arguments:
        translated["adam_beta1"], translated["adam_beta2"] = arguments["betas"]
        translated["adam_eps"] = arguments["eps"]
    else:
        translated["sgd_momentum"] = arguments["momentum"]
    return translated, bool(_TORCH_OPTIMIZERS[name]["decoupled"])


def _check_precision(given: Mapping[str, Any], precision: str) -> None:
    dtype = given.get("params_dtype", precision)
    if dtype != precision:
        raise ValueError(
            f"{_PATH}.params_dtype={dtype!r} contradicts policy.precision={precision!r}"
        )
    for flag, means in _PRECISION_OF_FLAG.items():
        if flag in given and given[flag] != (precision == means):
            raise ValueError(
                f"{_PATH}.{flag}={given[flag]} contradicts policy.precision={precision!r}"
            )


def _max_grad_norm(given: Mapping[str, Any], resolved: Mapping[str, Any]) -> float | None:
    own, policys = given.get("clip_grad"), resolved.get("max_grad_norm")
    if own is not None and policys is not None and own != policys:
        raise ValueError(f"{_PATH}.clip_grad={own} contradicts policy.max_grad_norm={policys}")
    return own if own is not None else policys
