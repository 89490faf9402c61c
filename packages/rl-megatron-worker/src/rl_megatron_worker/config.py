"""The policy config, parsed and validated once into the engine's typed settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.distributed import DistributedDataParallelConfig
from rl_interfaces import resolve_policy_config
from rl_interfaces.backend.engine import DTYPES
from rl_interfaces.backend.torch_optim import parse_optimizer, try_steps
from rl_interfaces.config.resolve import MEGATRON_DEFAULTS

from rl_megatron_worker.model.config import ModelOptions
from rl_megatron_worker.parallel.groups import MegatronLayout, plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_megatron_worker.model.config import Fields
    from rl_megatron_worker.parallel.groups import Section

_PATH = "policy.megatron_cfg"
_OPTIMIZER_PATH = f"{_PATH}.optimizer"
_MOE_OPTIONS = (
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_token_dispatcher_type",
    "moe_router_dtype",
)
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
# Flags of the section that duplicate `policy.precision`, and agree with it where they are true.
_PRECISION_OF_FLAG = {"bf16": "bfloat16", "fp16": "float16"}
_RATE_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
_WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


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
    wants_precision_aware: bool
    """Whether `use_precision_aware_optimizer` is set, whose update is taken without it."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All settings that the engine reads from the policy config.

    The worker reads its own, see `rl_interfaces.backend.worker.WorkerSettings`.
    """

    model_name: str
    converter_type: str
    layout: MegatronLayout
    model: ModelOptions
    sequence_multiple: int
    """Each sequence is padded internally to a multiple of this many tokens."""
    optimizer: OptimizerSettings | None
    scheduler: SchedulerSettings
    data_parallel: DistributedDataParallelConfig
    """How gradients are reduced over data-parallel ranks."""
    replays_routes: bool
    """Whether scoring returns the experts of each token, and training takes them again."""
    bias_update_rate: float
    """Change per step of the biases that balance experts; positive only for models without."""
    empty_unused_memory_level: int
    trust_remote_code: bool
    timeout_s: float
    seed: int

    @classmethod
    def from_policy_config(
        cls, config: Mapping[str, object], *, world_size: int, init_optimizer: bool
    ) -> EngineConfig:
        """Parse and check `config`.

        Raises:
            ValueError: A setting is invalid; the message names key and numbers.
        """
        resolved = resolve_policy_config(config)
        section = resolved["megatron_cfg"]
        layout = plan_layout(section, world_size=world_size)
        _check_policy(resolved)
        optimizer = _parse_optimizer(resolved) if init_optimizer else None
        return cls(
            model_name=resolved["model_name"],
            converter_type=section["converter_type"],
            layout=layout,
            model=_parse_model(section, precision=resolved["precision"]),
            sequence_multiple=math.lcm(
                layout.token_multiple, resolved["make_sequence_length_divisible_by"]
            ),
            optimizer=optimizer,
            scheduler=_parse_scheduler(resolved, optimizer),
            data_parallel=_parse_data_parallel(section, optimizer),
            replays_routes=section["moe_router_replay"],
            bias_update_rate=section.get("moe_router_bias_update_rate", 0.0),
            empty_unused_memory_level=section["empty_unused_memory_level"],
            trust_remote_code=resolved["trust_remote_code"],
            timeout_s=resolved["timeout_s"],
            seed=resolved["seed"],
        )


def _check_policy(resolved: Section) -> None:
    """Raise if a setting needs another backend, or cannot be."""
    level = resolved["megatron_cfg"]["empty_unused_memory_level"]
    _require_choice(f"{_PATH}.empty_unused_memory_level", level, (0, 1, 2))
    if resolved["head"] != "language_model":
        raise ValueError(
            f"policy.head={resolved['head']!r} needs another backend: Megatron-core supports "
            "language models only"
        )
    if resolved["fsdp_offload_enabled"]:
        raise ValueError(
            f"policy.fsdp_offload_enabled=True needs FSDP, and {_PATH}.enabled=True has none"
        )


def _parse_model(section: Section, *, precision: str) -> ModelOptions:
    pipeline_dtype = section.get("pipeline_dtype", precision)
    if pipeline_dtype != precision:
        raise ValueError(
            f"{_PATH}.pipeline_dtype={pipeline_dtype!r} contradicts policy.precision="
            f"{precision!r}: stages exchange activations in the compute dtype"
        )
    recomputed = _parse_recomputation(section) if section["activation_checkpointing"] else {}
    return ModelOptions(
        params_dtype=DTYPES[precision],
        moe_options=_parse_experts(section),
        freezes_routers=section["freeze_moe_router"],
        fuses_rope=section["apply_rope_fusion"],
        **recomputed,
    )


def _parse_experts(section: Section) -> Fields:
    kind, weight = section["moe_router_load_balancing_type"], section["moe_aux_loss_coeff"]
    key = f"{_PATH}.moe_router_load_balancing_type"
    if kind == "seq_aux_loss":
        raise ValueError(
            f"{key}='seq_aux_loss' is per sequence, but each micro-batch is packed into one: "
            "set 'aux_loss', which is per micro-batch"
        )
    if kind == "sinkhorn":
        raise ValueError(
            f"{key}='sinkhorn' routes tokens to other experts in training than in scoring, and "
            "weights them differently from the model: set 'aux_loss' or 'none'"
        )
    _require_choice(key, kind, ("none", "aux_loss"))
    if weight and kind != "aux_loss":
        raise ValueError(
            f"{_PATH}.moe_aux_loss_coeff={weight} needs {key}='aux_loss', got {kind!r}"
        )
    if "moe_router_dtype" in section:
        dtype = section["moe_router_dtype"]
        _require_choice(f"{_PATH}.moe_router_dtype", dtype, ("fp32", "fp64"))
    return {name: section[name] for name in _MOE_OPTIONS if name in section}


def _parse_recomputation(section: Section) -> Fields:
    granularity, method = section["recompute_granularity"], section["recompute_method"]
    _require_choice(f"{_PATH}.recompute_granularity", granularity, ("full", "selective"))
    _require_choice(f"{_PATH}.recompute_method", method, ("uniform", "block"))
    if granularity == "selective":
        return {"recompute_granularity": granularity}
    num_layers = section["recompute_num_layers"]
    if num_layers < 1:
        raise ValueError(f"{_PATH}.recompute_num_layers={num_layers} must be at least 1")
    return {
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }


def _parse_data_parallel(
    section: Section, optimizer: OptimizerSettings | None
) -> DistributedDataParallelConfig:
    given = section["distributed_data_parallel_config"]
    path = f"{_PATH}.distributed_data_parallel_config"
    if given["use_custom_fsdp"]:
        raise ValueError(
            f"{path}.use_custom_fsdp=True: this worker does not run Megatron's own FSDP; "
            "policy.dtensor_cfg is FSDP2"
        )
    if (
        given["overlap_param_gather"]
        and optimizer is not None
        and not (optimizer.is_distributed and given["overlap_grad_reduce"])
    ):
        raise ValueError(
            f"{path}.overlap_param_gather=True needs {path}.overlap_grad_reduce=True and "
            f"{_PATH}.optimizer.use_distributed_optimizer=True"
        )
    # Not `average_in_collective`: where a mean over ranks is taken changes nothing of a gradient
    # that is a sum over ranks, of losses that were divided by the counts of all of them.
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=given["grad_reduce_in_fp32"],
        overlap_grad_reduce=given["overlap_grad_reduce"],
        overlap_param_gather=given["overlap_param_gather"],
        use_distributed_optimizer=optimizer is not None and optimizer.is_distributed,
    )


def _require_choice(key: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value!r} must be one of {choices}")


def _parse_optimizer(resolved: Section) -> OptimizerSettings:
    """Return the optimizer; `policy.optimizer` is translated if the section has none."""
    given = resolved["megatron_cfg"].get("optimizer")
    decoupled = True
    if given is None:
        given, decoupled = _from_torch(resolved)
    if "lr" not in given:
        raise ValueError(f"{_OPTIMIZER_PATH}.lr is not set: the learning rate")
    _require_choice(f"{_OPTIMIZER_PATH}.optimizer", given["optimizer"], ("adam", "sgd"))
    if given["optimizer"] == "sgd" and given["use_distributed_optimizer"]:
        raise ValueError(
            f"{_OPTIMIZER_PATH}.use_distributed_optimizer=True needs "
            f"{_OPTIMIZER_PATH}.optimizer='adam'"
        )
    if not given["min_lr"] <= given["lr"]:
        raise ValueError(
            f"{_OPTIMIZER_PATH}.min_lr={given['min_lr']} must not be above lr={given['lr']}"
        )
    _check_precision(given, resolved["precision"])
    if given["use_precision_aware_optimizer"] and not given["use_distributed_optimizer"]:
        raise ValueError(
            f"{_OPTIMIZER_PATH}.use_precision_aware_optimizer=True needs "
            f"{_OPTIMIZER_PATH}.use_distributed_optimizer=True"
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
        wants_precision_aware=given["use_precision_aware_optimizer"],
        max_grad_norm=_max_grad_norm(given, resolved),
    )


def _parse_scheduler(resolved: Section, optimizer: OptimizerSettings | None) -> SchedulerSettings:
    """Return the schedule: constant by default, at the optimizer's own weight decay."""
    if "scheduler" in resolved:
        raise ValueError(
            "policy.scheduler configures torch's schedulers: with policy.megatron_cfg.enabled=True "
            "set policy.megatron_cfg.scheduler"
        )
    given = resolved["megatron_cfg"].get("scheduler", MEGATRON_DEFAULTS["scheduler"])
    path = f"{_PATH}.scheduler"
    style, decay_style = given["lr_decay_style"], given["weight_decay_incr_style"]
    _require_choice(f"{path}.lr_decay_style", style, _RATE_STYLES)
    _require_choice(f"{path}.weight_decay_incr_style", decay_style, _WEIGHT_DECAY_STYLES)
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
            f"{_OPTIMIZER_PATH}.lr={optimizer.lr}"
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


def _weight_decays(given: Section, own: float, *, path: str) -> tuple[float, float]:
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


def _from_torch(resolved: Section) -> tuple[Section, bool]:
    """Return `policy.optimizer` as Megatron-core's keys, and whether its decay is decoupled."""
    given = resolved.get("optimizer")
    if given is None:
        raise ValueError(
            f"{_OPTIMIZER_PATH} is not set, nor is policy.optimizer, and init_optimizer=True needs "
            "one: give {optimizer: adam, lr: ...}, or pass init_optimizer=False"
        )
    name = given.get("name")
    if name not in _TORCH_OPTIMIZERS:
        raise ValueError(
            f"policy.optimizer.name={name!r} has no counterpart in Megatron-core (supported: "
            f"{', '.join(_TORCH_OPTIMIZERS)}): set {_OPTIMIZER_PATH}"
        )
    defaults = _TORCH_DEFAULTS[name]
    kwargs = given.get("kwargs", {})
    if unknown := sorted(kwargs.keys() - defaults.keys()):
        raise ValueError(
            f"policy.optimizer.kwargs.{unknown[0]}={kwargs[unknown[0]]!r} has no counterpart in "
            f"Megatron-core (supported: {', '.join(defaults)}): set {_OPTIMIZER_PATH}"
        )
    # torch knows what its own arguments may be; Megatron-core checks none.
    try_steps(parse_optimizer(given), None)
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


def _check_precision(given: Section, precision: str) -> None:
    # The optimizer's own copy of the parameters is in float32 for every precision, and float32 is
    # what the reference's examples say beside bfloat16.
    dtype = given.get("params_dtype", precision)
    if dtype not in (precision, "float32"):
        raise ValueError(
            f"{_OPTIMIZER_PATH}.params_dtype={dtype!r} contradicts policy.precision={precision!r}"
        )
    for flag, means in _PRECISION_OF_FLAG.items():
        # The reference's examples say False beside bfloat16 too, and train in bfloat16.
        if given.get(flag) and precision != means:
            raise ValueError(
                f"{_OPTIMIZER_PATH}.{flag}={given[flag]} contradicts policy.precision={precision!r}"
            )


def _max_grad_norm(given: Section, resolved: Section) -> float | None:
    own, policys = given.get("clip_grad"), resolved.get("max_grad_norm")
    if own is not None and policys is not None and own != policys:
        raise ValueError(
            f"{_OPTIMIZER_PATH}.clip_grad={own} contradicts policy.max_grad_norm={policys}"
        )
    return own if own is not None else policys
