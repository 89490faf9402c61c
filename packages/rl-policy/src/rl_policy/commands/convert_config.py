"""A configuration of NeMo RL as one of ours, with a word on every key.

A key moves to another name, is what happens here anyway, or is lost; the last are marked, as the
run is another one without them. The keys are those of the example configurations of NeMo RL 0.3 to
0.7, https://github.com/NVIDIA-NeMo/RL/tree/main/examples/configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rl_interfaces import PolicyConfig
from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.config.schema import MOST, check_type
from typing_extensions import is_typeddict

from rl_policy.config import (
    Settings,
    add_arithmetic,
    flatten,
    nest,
    new_run_config,
    parse_run_overrides,
)
from rl_policy.generation.vllm.config import VllmSection

# The section that is NeMo RL's for a recipe of ours.
_RECIPES = {"grpo": "grpo", "sft": "sft", "dpo": "dpo", "rm": "rm", "distillation": "distill"}
_ALREADY, _LOST = "as here: ", "LOST: "
# Keys that mean something together, which `_Writer.finish` sets.
_CORRECTION = "loss_fn.use_importance_sampling_correction"
_ASYNC, _AGE = "grpo.async_grpo.enabled", "grpo.async_grpo.max_trajectory_age_steps"
_DIVERGENCE, _PROMPTS = "loss_fn.kl_type", "distillation.num_prompts_per_step"
_TOGETHER = (_CORRECTION, _ASYNC, _AGE, _DIVERGENCE, "loss_fn.mixed_kl_weight", _PROMPTS)
_TRACKERS = ("tensorboard", "wandb", "mlflow")
# Datasets that NeMo RL knows by names of its own: their name on the hub, split and columns.
_DATASETS = {
    "OpenMathInstruct-2": (
        "nvidia/OpenMathInstruct-2",
        "train_1M",
        {"prompt": "problem", "answer": "expected_answer"},
    ),
    "DeepScaler": (
        "agentica-org/DeepScaleR-Preview-Dataset",
        "train",
        {"prompt": "problem", "answer": "answer"},
    ),
}


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a key.

    Attributes:
        key: The key.
        text: Its new name, or why it has none.
    """

    key: str
    text: str

    @property
    def is_lost(self) -> bool:
        """Whether the run is another one without it."""
        return self.text.startswith(_LOST)

    def __str__(self) -> str:
        """Return a line."""
        return f"{self.key}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A converted configuration.

    Attributes:
        recipe: The command that runs it.
        settings: What `rl-policy RECIPE --config` reads.
        fates: One for each key, in the order of the file.
        problem: Why it is no run yet; None if it validates.
    """

    recipe: str
    settings: Settings
    fates: tuple[Fate, ...]
    problem: str | None

    def render(self) -> str:
        """Return the YAML file, with the fates as comments above it."""
        lines = [f"# {each}" for each in self.fates if each.is_lost]
        head = [f"# For: rl-policy {self.recipe} --config THIS_FILE"]
        if lines:
            head.append("# What NeMo RL had and this has not:")
        return "\n".join([*head, *lines, yaml.safe_dump(self.settings, sort_keys=False)])


def convert(path: Path, overrides: list[str] | None = None) -> Conversion:
    """Return the configuration of a NeMo RL file.

    Args:
        path: The file; those that its `defaults` name are read too.
        overrides: `section.key=value` of ours, over what was converted.

    Raises:
        ValueError: It cannot be read, or is of an algorithm without a recipe here.
    """
    source = _read(path)
    found = [name for name in _RECIPES if name in source]
    if len(found) != 1:
        others = ", ".join(key for key in source if key not in ("policy", "data", "cluster"))
        raise ValueError(
            f"{path} has none of the sections {', '.join(_RECIPES)} alone, which there are recipes "
            f"for; it has {others}"
        )
    if not isinstance(source.get("policy"), Mapping):
        raise ValueError(f"{path} has no section policy")
    recipe = _RECIPES[found[0]]
    writer = _Writer(section=found[0], source=source)
    writer.rename_automodel()
    for key, value in flatten(source).items():
        writer.convert(key, value)
    writer.finish()
    settings = nest(writer.settings)
    settings = merge_sections(settings, parse_run_overrides(recipe, overrides or []))
    problem = None
    try:
        new_run_config(recipe, settings)
    except ValueError as error:
        problem = str(error)
    return Conversion(recipe=recipe, settings=settings, fates=tuple(writer.fates), problem=problem)


def _read(path: Path) -> Settings:
    """Return the content of a file over that of its `defaults`, interpolations resolved."""
    add_arithmetic()
    try:
        content = OmegaConf.to_container(_merged(path, ()), resolve=True)
    except (OSError, yaml.YAMLError, OmegaConfBaseException, TypeError) as error:
        raise ValueError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _merged(path: Path, below: tuple[Path, ...]) -> DictConfig:
    if path.resolve() in below:
        raise ValueError(f"cannot read {path}: its defaults name itself")
    try:
        content = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, DictConfig):
        raise ValueError(f"{path} must hold a mapping")
    defaults = content.pop("defaults", None)
    names = [defaults] if isinstance(defaults, str) else list(defaults or ())
    bases = [
        _merged(path.parent / name, (*below, path.resolve()))
        for name in names
        if isinstance(name, str) and name != "_self_"
    ]
    base = OmegaConf.merge(OmegaConf.create(), *bases)
    assert isinstance(base, DictConfig)
    _drop_overridden(base, content)
    merged = OmegaConf.merge(base, content)
    assert isinstance(merged, DictConfig)
    return merged


def _drop_overridden(base: DictConfig, content: DictConfig) -> None:
    """Drop from `base` what `content` replaces: sections marked `_override_`, dicts by lists."""
    for key in map(str, content):
        if OmegaConf.is_missing(content, key) or OmegaConf.is_interpolation(content, key):
            continue
        section = content[key]
        if key not in base or not OmegaConf.is_config(section):
            continue
        if OmegaConf.is_interpolation(base, key):
            continue
        below = base[key]
        is_replaced = isinstance(section, DictConfig) and section.pop("_override_", False)
        if is_replaced or type(below) is not type(section):
            del base[key]
        elif isinstance(section, DictConfig):
            _drop_overridden(below, section)


Rule: TypeAlias = "str | tuple[str, Callable[[Any], Any]] | _Kept"
"""A new name, a new name and what its value becomes, or why there is none."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Why a key has no new name.

    Attributes:
        harmless: Values that are what happens here anyway.
        reason: What is lost with others; empty: nothing is.
    """

    harmless: tuple[Any, ...]
    reason: str = ""


def _nothing(reason: str) -> _Kept:
    return _Kept((), reason)


_UNNEEDED = _Kept(())

_LOSS: Mapping[str, Rule] = {
    "reference_policy_kl_penalty": "loss.kl_coef",
    "ratio_clip_min": "loss.clip_low",
    "ratio_clip_max": "loss.clip_high",
    "ratio_clip_c": "loss.dual_clip",
    "token_level_loss": (
        "loss.loss_type",
        lambda is_token: "token_level" if is_token else "sequence_level",
    ),
    "truncated_importance_sampling_ratio": "loss.importance_cap",
    "reference_policy_kl_type": _Kept(
        ("k3", None), "set loss.kl_estimator, and for k1 loss.kl_unbiased=true"
    ),
    "use_on_policy_kl_approximation": _Kept((False, None), "see loss.kl_unbiased"),
    "sequence_level_importance_ratios": (
        "loss.ratio_level",
        lambda is_sequence: "sequence" if is_sequence else "token",
    ),
    "disable_ppo_ratio": _Kept((False, None), "ratios are clipped"),
    "kl_input_clamp_value": "loss.kl_log_ratio_clamp",
    "kl_output_clamp_value": "loss.kl_clamp",
}
# A batch of preferences is counted there in pairs, and here in rows.
_OF_PAIRS: Mapping[str, Rule] = {
    f"policy.{key}": (f"policy.{key}", lambda pairs: 2 * pairs)
    for key in ("train_global_batch_size", "train_micro_batch_size")
}
# How a validation is batched.
_VALIDATION: Mapping[str, Rule] = dict.fromkeys(
    (
        "val_batches",
        "val_batch_size",
        "val_global_batch_size",
        "val_micro_batch_size",
    ),
    _UNNEEDED,
)
_RULES: Mapping[str, Mapping[str, Rule]] = {
    "grpo": {
        "grpo.num_prompts_per_step": "grpo.prompts_per_step",
        "grpo.num_generations_per_prompt": "grpo.samples_per_prompt",
        "grpo.normalize_rewards": "grpo.divide_by_std",
        "grpo.use_leave_one_out_baseline": "grpo.leave_one_out",
        "grpo.max_val_samples": "data.num_heldout",
        "grpo.max_rollout_turns": _Kept(
            (1, None), "a completion is one turn: set environment.function and .max_turns"
        ),
        "grpo.overlong_filtering": _Kept((False, None), "truncated completions are trained on"),
        "grpo.use_dynamic_sampling": _Kept((False, None), "set grpo.dynamic_sampling"),
        "grpo.skip_reference_policy_logprobs_calculation": _UNNEEDED,
        **{f"loss_fn.{key}": rule for key, rule in _LOSS.items()},
    },
    "sft": {},
    "rm": {
        **_OF_PAIRS,
        "policy.reward_model_cfg.enabled": _UNNEEDED,
        "policy.reward_model_cfg.reward_model_type": _Kept(
            ("bradley_terry", None), "the loss is that of Bradley and Terry"
        ),
    },
    "distillation": {
        "distillation.topk_logits_k": "distill.top_k",
        "distillation.max_val_samples": "data.num_heldout",
        "distillation.num_generations_per_prompt": _Kept((1, None), "a prompt has one completion"),
        "distillation.max_rollout_turns": _Kept((1, None), "a completion is one turn"),
        "teacher.model_name": "distill.teacher",
        "loss_fn.zero_outside_topk": (
            "distill.truncate_student",
            lambda keeps_the_rest: not keeps_the_rest,
        ),
    },
    "dpo": {
        **_OF_PAIRS,
        "dpo.reference_policy_kl_penalty": "dpo.beta",
        "dpo.preference_average_log_probs": _Kept((False, None), "log-probabilities are sums"),
        "dpo.sft_loss_weight": _Kept((0, None), "the loss is DPO's alone"),
        "dpo.sft_average_log_probs": _UNNEEDED,
        "dpo.preference_loss_weight": _Kept((1, None), "the loss is DPO's alone"),
    },
}
_COMMON: Mapping[str, Rule] = {
    "checkpointing.save_period": "checkpoint.every",
    "checkpointing.keep_top_k": ("checkpoint.keep_last", lambda count: count or 2),
    "checkpointing.checkpoint_dir": _Kept((), ""),
    "cluster.gpus_per_node": _UNNEEDED,
    "cluster.num_nodes": _UNNEEDED,
    "cluster.segment_size": _UNNEEDED,
    "policy.generation.vllm_cfg.async_engine": _UNNEEDED,
    "policy.generation.vllm_cfg.pipeline_parallel_size": _Kept(
        (1, None), "an engine is tensor parallel alone"
    ),
    "policy.generation.vllm_cfg.expert_parallel_size": _Kept(
        (1, None), "an engine is tensor parallel alone"
    ),
    "policy.generation.vllm_cfg.kv_cache_dtype": _Kept(
        ("auto", None), "the key-value cache is of the engine's dtype"
    ),
    "policy.dtensor_cfg._v2": _UNNEEDED,
    "policy.dtensor_cfg.lora_cfg.enabled": "policy.dtensor_cfg.lora.enabled",
    "policy.dtensor_cfg.lora_cfg.dim": "policy.dtensor_cfg.lora.r",
    "policy.dtensor_cfg.lora_cfg.alpha": "policy.dtensor_cfg.lora.lora_alpha",
    "policy.dtensor_cfg.lora_cfg.dropout": "policy.dtensor_cfg.lora.lora_dropout",
    "policy.refit_buffer_size_gb": (
        "refit.bucket_mib",
        lambda gib: None if gib is None else max(1, int(gib * 1024)),
    ),
    "policy.generation.backend": ("policy.generation.backend", lambda name: "vllm"),
}
# Of the policy's section, what a teacher that only scores has no use for.
_OF_TRAINING = ("tokenizer", "generation", "optimizer", "scheduler", "max_grad_norm")
# Sections without a counterpart, and what is lost with them.
_SECTIONS: Mapping[str, str] = {
    "env.": "the reward is the answer itself, your function (set reward.function), or that of an "
    "environment (environment.function)",
    "logger.": "",
    "checkpointing.": "",
    "policy.megatron_cfg.peft.": "Megatron trains no adapters",
    "policy.megatron_cfg.fp8_cfg.": "training is not in float8",
    "policy.dtensor_cfg.lora_cfg.": "",
    # Of a backend that policy.generation.backend does not name, or that vLLM replaces.
    "policy.generation.mcore_generation_config.": "",
}


class _Writer:
    """Collects the new settings and the fates of keys.

    Args:
        section: That of the algorithm.
        source: The content of the file.
    """

    def __init__(self, *, section: str, source: Settings) -> None:
        self.settings: dict[str, Any] = {}
        self.fates: list[Fate] = []
        self._source = source
        self._section, recipe = section, _RECIPES[section]
        every: dict[str, Rule] = {
            "max_num_steps": f"{recipe}.steps",
            # 0 or less is never there; here the last step is measured all the same.
            "val_period": (
                f"{recipe}.eval_every",
                lambda period: period if period > 0 else MOST,
            ),
            "val_at_start": f"{recipe}.eval_at_start",
            "seed": "seed",
            "max_num_epochs": _nothing("the number of steps alone ends a run"),
            **_VALIDATION,
        }
        self._rules = {
            **_COMMON,
            **{f"{section}.{key}": rule for key, rule in every.items()},
            **_RULES[section],
        }
        self._has_engines = recipe in ("grpo", "distill")

    def rename_automodel(self) -> None:
        """Move the sections `automodel_cfg` of newer files over those of `dtensor_cfg`."""
        for owner in ("policy", "teacher"):
            section = self._source.get(owner)
            if isinstance(section, dict) and isinstance(section.get("automodel_cfg"), dict):
                newer = section.pop("automodel_cfg")
                section["dtensor_cfg"] = merge_sections(section.get("dtensor_cfg") or {}, newer)
                self._note(f"{owner}.automodel_cfg", f"-> {owner}.dtensor_cfg, as every key of it")

    def convert(self, key: str, value: Any) -> None:
        """Take one key."""
        if key in _TOGETHER:
            return
        if key == f"{self._section}.max_num_steps" and isinstance(value, int) and value < 1:
            self._drop(key, value, f"set {self._rules[key]}, which has no number for all epochs")
        elif key in self._rules:
            self._by_rule(key, value, self._rules[key])
        elif key.startswith("teacher."):
            self._teacher_key(key, value)
        elif key.startswith("data."):
            self._note(key, "see data.path")
        elif sections := [name for name in _SECTIONS if key.startswith(name)]:
            self._drop(key, value, "" if self._is_disabled(key) else _SECTIONS[sections[0]])
        elif key.startswith("policy.generation.vllm_kwargs."):
            name = key.removeprefix("policy.generation.vllm_kwargs.")
            self._set(key, f"policy.generation.vllm_cfg.engine_kwargs.{name}", value)
        elif key.startswith("policy.generation.vllm_cfg."):
            self._engine_key(key, value)
        elif key.startswith("policy."):
            self._policy_key(key, value)
        else:
            self._drop_unknown(key, value)

    def _is_disabled(self, key: str) -> bool:
        """Return whether a section that a key is below is switched off."""
        section: Any = self._source
        for part in key.split(".")[:-1]:
            section = section[part]
            if section.get("enabled") is False:
                return True
        return False

    def _drop_unknown(self, key: str, value: Any) -> None:
        """Drop a key that nothing here is like."""
        does_nothing = _is_off(value) or self._is_disabled(key)
        self._drop(key, value, "" if does_nothing else "there is nothing like it")

    def finish(self) -> None:
        """Set what follows from several keys."""
        self._set_cluster()
        self._set_data()
        self._set_trackers()
        self._leave_room()
        self._set_correction()
        self._set_async()
        self._set_divergence()
        self._set_scoring_tokens()
        lora = "policy.dtensor_cfg.lora."
        if self.settings.get(f"{lora}enabled") is False:
            kept = {key: value for key, value in self.settings.items() if not key.startswith(lora)}
            self.settings = kept

    def _set_correction(self) -> None:
        """Set the correction of importance, which there is a switch and an optional bound."""
        if self._section != "grpo" or "loss_fn" not in self._source:
            return
        if not self._source["loss_fn"].get("use_importance_sampling_correction", False):
            self.settings["loss.importance_cap"] = None
            self._note(_CORRECTION, "-> loss.importance_cap=null")
        elif "loss.importance_cap" in self.settings:
            self._note(_CORRECTION, "-> loss.importance_cap")
        else:
            self._note(_CORRECTION, f"{_LOST}weights are truncated, at loss.importance_cap")

    def _set_async(self) -> None:
        """Set the staleness, which there is counted in steps and here in optimizer steps."""
        grpo = self._source.get("grpo") or {}
        section = grpo.get("async_grpo") or {}
        if not section:
            return
        age = section.get("max_trajectory_age_steps")
        if not section.get("enabled") or not age:
            self._drop(_ASYNC, section.get("enabled"), "")
            self._drop(_AGE, age, "")
        elif self._is_colocated():
            self._drop(_ASYNC, True, "engines that share the policy's devices are synchronous")
            self._drop(_AGE, age, "steps are synchronous")
        else:
            samples = grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]
            updates = max(1, samples // self._source["policy"]["train_global_batch_size"])
            self.settings["async.max_staleness"] = age * updates
            self._note(_ASYNC, "-> async.max_staleness")
            self._note(_AGE, f"-> async.max_staleness={age * updates}, in optimizer steps")

    def _set_divergence(self) -> None:
        """Set the divergence of a distillation, and hold its steps against those of there."""
        if self._section != "distillation":
            return
        loss = self._source.get("loss_fn") or {}
        kind, weight = loss.get("kl_type", "forward"), loss.get("mixed_kl_weight")
        betas = {"forward": 0.0, "reverse": 1.0}
        if kind in betas:
            self.settings["distill.beta"] = betas[kind]
            self._note(_DIVERGENCE, f"-> distill.beta={betas[kind]}")
            self._drop("loss_fn.mixed_kl_weight", weight, "")
        else:
            beta = 1.0 - (0.5 if weight is None else weight)
            self.settings["distill.beta"] = beta
            text = (
                f"{_LOST}a mean of both divergences, for which distill.beta={beta} takes its place"
            )
            self._note(_DIVERGENCE, text)
            self._note("loss_fn.mixed_kl_weight", f"-> distill.beta={beta}")
        prompts = self._source["distillation"].get("num_prompts_per_step")
        batch = self._source["policy"].get("train_global_batch_size")
        differs = f"a step has one optimizer step, of policy.train_global_batch_size={batch}"
        self._drop(_PROMPTS, prompts, "" if prompts in (None, batch) else differs)

    def _set_scoring_tokens(self) -> None:
        """Give a micro-batch that is scored the tokens of a trained one, where there is no other.

        Files of algorithms that score nothing there have the one size alone.
        """
        for section in ("sequence_packing", "dynamic_batching"):
            key = f"policy.{section}.logprob_mb_tokens"
            tokens = self.settings.get(f"policy.{section}.train_mb_tokens")
            if tokens is not None and key not in self.settings:
                self.settings[key] = tokens
                self._note(key, f"not set: that of train_mb_tokens={tokens}")

    def _teacher_key(self, key: str, value: Any) -> None:
        """Take a key of the teacher, whose section there is a full one."""
        parts = key.split(".")[1:]
        same: Any = self._source["policy"]
        for part in parts:
            same = same.get(part) if isinstance(same, Mapping) else None
        if same == value or parts[0] in _OF_TRAINING:
            self._drop(key, value, "")
        elif _hint_of(parts, PolicyConfig) is None:
            self._drop_unknown(key, value)
        else:
            self._set(key, f"distill.teacher_policy.{'.'.join(parts)}", value)

    def _is_colocated(self) -> bool:
        """Return whether engines share the devices of the policy."""
        generation = self._source["policy"].get("generation") or {}
        return bool((generation.get("colocated") or {}).get("enabled", True))

    def _set_trackers(self) -> None:
        section = self._source.get("logger", {})
        names = [name for name in _TRACKERS if section.get(f"{name}_enabled")]
        if names:
            self.settings["logger"] = names
            self._note("logger", f"-> logger={names}")

    def _by_rule(self, key: str, value: Any, rule: Rule) -> None:
        if isinstance(rule, _Kept):
            is_harmless = not rule.reason or value in rule.harmless
            self._drop(key, value, "" if is_harmless else rule.reason)
            return
        name, change = (rule, None) if isinstance(rule, str) else rule
        if name.startswith("refit.") and not self._has_engines:
            self._drop(key, value, "")
            return
        changed = value if change is None or value is None else change(value)
        if rule == _OF_PAIRS.get(key):
            self.settings[key] = changed
            self._note(key, f"-> {key}, of {changed} rows for {value} pairs")
            return
        if changed is None and value is not None:
            self._drop(key, value, "")
        elif change is not None and name == key and changed != value:
            self.settings[name] = changed
            self._note(key, f"{_LOST}{value!r} is not there, {changed!r} takes its place")
        else:
            self._set(key, name, changed)

    def _engine_key(self, key: str, value: Any) -> None:
        name = key.removeprefix("policy.generation.vllm_cfg.")
        if name not in {each.name for each in fields(VllmSection)}:
            self._drop(key, value, "" if _is_off(value) else "vLLM's own keys go to engine_kwargs")
        elif name == "precision" and value not in ("float32", "bfloat16", "float16", "auto"):
            self.settings[key] = "auto"
            self._note(key, f"{_LOST}engines serve in the model's dtype, not in {value!r}")
        else:
            self._set(key, key, value)

    def _policy_key(self, key: str, value: Any) -> None:
        hint = _hint_of(key.split(".")[1:], PolicyConfig)
        if hint is None:
            self._drop_unknown(key, value)
        elif value is None:
            self._drop(key, value, "")
        else:
            try:
                check_type(value, hint, path=key)
            except ValueError as error:
                self._drop(key, value, str(error))
            else:
                self._set(key, key, value)

    def _set_cluster(self) -> None:
        cluster = self._source.get("cluster", {})
        gpus, nodes = cluster.get("gpus_per_node", 1), cluster.get("num_nodes", 1)
        colocated = self._source["policy"].get("generation") or {}
        colocated = colocated.get("colocated") or {}
        resources = colocated.get("resources") or {}
        if not colocated.get("enabled", True):
            # There they are a part of the cluster, here besides it.
            if resources.get("num_nodes"):
                nodes -= resources["num_nodes"]
            elif resources.get("gpus_per_node"):
                gpus -= resources["gpus_per_node"]
        bundles = [max(gpus, 1)] * max(nodes, 1)
        self.settings["cluster.bundle_ct_per_node_list"] = bundles
        self.settings["cluster.num_gpus_per_node"] = cluster.get("gpus_per_node", 8)
        self._note("cluster", f"-> cluster.bundle_ct_per_node_list={bundles}")

    def _set_data(self) -> None:
        data = self._source.get("data", {})
        train = _dataset(data, "train")
        name = train.get("data_path") or train.get("train_data_path") or train.get("dataset_name")
        if name in _DATASETS:
            path, split, columns = _DATASETS[name]
            self.settings |= {"data.path": path, "data.split": split, "data.columns": columns}
            self._note("data", f"-> data.path={path}, data.split, data.columns")
        elif name is None:
            self._note("data", f"{_LOST}it names no data: set data.path")
        else:
            self.settings["data.path"] = str(name)
            is_own = "data_path" in train or "train_data_path" in train
            columns = {
                "prompt": train.get("input_key") or train.get("prompt_key"),
                "answer": train.get("output_key"),
                "chosen": train.get("chosen_key"),
                "rejected": train.get("rejected_key"),
            }
            known = {ours: theirs for ours, theirs in columns.items() if theirs}
            if known:
                self.settings["data.columns"] = known
            self._note(
                "data",
                f"-> data.path={name}"
                if is_own
                else f"{_LOST}{name!r} is a name of NeMo RL's: set data.path and data.columns",
            )
        validation = _dataset(data, "validation")
        named = data.get("val_data_paths") or {}
        heldout = validation.get("data_path") or data.get("val_data_path") or [*named.values()]
        if heldout:
            path = list(map(str, heldout)) if isinstance(heldout, list) else str(heldout)
            self.settings["data.heldout_path"] = path
            self._note("data.validation", f"-> data.heldout_path={path}")
        if isinstance(data.get("train"), list) and len(data["train"]) > 1:
            self._note("data.train", f"{_LOST}the first of {len(data['train'])} datasets alone")
        for key in ("prompt_file", "system_prompt_file"):
            if train.get(key):
                self._note(f"data.{key}", f"{_LOST}a prompt is what the data has")

    def _leave_room(self) -> None:
        """Let a prompt have room beside its completion, which there share a limit."""
        new = self.settings.get("policy.generation.max_new_tokens")
        total = self.settings.get("policy.max_total_sequence_length")
        if new is not None and total is not None and new >= total:
            self.settings["policy.generation.max_new_tokens"] = max(1, total // 2)
            self._note(
                "policy.generation.max_new_tokens",
                f"{_LOST}{new} leaves a prompt no room in the {total} tokens of both, and the half "
                "takes its place",
            )

    def _set(self, key: str, name: str, value: Any) -> None:
        if value is None:
            self._drop(key, value, "")
            return
        self.settings[name] = value
        self._note(key, "kept" if name == key else f"-> {name}")

    def _drop(self, key: str, value: Any, reason: str) -> None:
        self._note(key, f"{_LOST}{value!r}: {reason}" if reason else f"{_ALREADY}not needed")

    def _note(self, key: str, text: str) -> None:
        self.fates.append(Fate(key, text))


def _is_off(value: Any) -> bool:
    """Return whether a value is what an unknown key most likely has where it does nothing."""
    if value is True:
        return False
    return value in (None, False, 0, 1, {}, [], "", "none")


def _dataset(data: Mapping[str, Any], part: str) -> Settings:
    """Return the settings of training or validation data, whichever way they are written."""
    section = data.get(part)
    if isinstance(section, list):
        section = section[0] if section else {}
    own = section if isinstance(section, Mapping) else {}
    shared = data.get("default") or {}
    flat = {key: value for key, value in data.items() if not isinstance(value, Mapping | list)}
    return {**flat, **shared, **own}


def _hint_of(parts: list[str], typed_dict: type) -> Any:
    """Return the type of a key below a TypedDict; None where there is no such key."""
    hint: Any = get_type_hints(typed_dict, include_extras=True).get(parts[0])
    if hint is None or len(parts) == 1:
        return hint
    for member in _members(hint):
        if is_typeddict(member):
            return _hint_of(parts[1:], member)
        if get_origin(member) is dict:
            return get_args(member)[1]
    return None


def _members(hint: Any) -> Iterator[Any]:
    """Yield a type, or those that it is composed of."""
    if isinstance(hint, type) or get_origin(hint) in (dict, list):
        yield hint
        return
    for argument in get_args(hint):
        yield from _members(argument)
