"""What a run works with, checked as far as it can be before anything starts."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rl_policy import backends
from rl_policy.config import RunConfig
from rl_policy.data.arithmetic import arithmetic_problems
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.problems import Problem, ProblemSets, divide_problems, read_problems
from rl_policy.data.rewards import ExactMatch
from rl_policy.data.tiny_model import build_tokenizer, tiny_model_config
from rl_policy.run.engines import check_engines

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """The configuration, and what follows from it alone."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    encoder: ProblemEncoder
    problems: ProblemSets
    reward: ExactMatch


def prepare_inputs(config: RunConfig) -> RunInputs:
    """Return the inputs of a run; nothing is written, and no process is started.

    Raises:
        ValueError: The configuration cannot be run; the message names keys and numbers, or file
            and line.
    """
    reward = ExactMatch(config.reward.answer_pattern)
    tokenizer = build_tokenizer() if config.has_builtin_model else _load_tokenizer(config)
    encoder = ProblemEncoder(
        tokenizer,
        use_chat_template=config.data.use_chat_template,
        stop_token_ids=config.policy["generation"].get("stop_token_ids", ()),
        stop_strings=config.policy["generation"].get("stop_strings", ()),
    )
    problems = _load_problems(config)
    _check_lengths(config, problems, encoder=encoder)
    _check_backend(config)
    check_engines(config)
    return RunInputs(
        config=config, tokenizer=tokenizer, encoder=encoder, problems=problems, reward=reward
    )


def _load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    section = config.policy["tokenizer"]
    name = section["name"]
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        key = "model_name" if name == config.policy["model_name"] else "tokenizer.name"
        raise ValueError(f"policy.{key}={name!r} is no directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=config.policy["trust_remote_code"]
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"policy.tokenizer.name={name!r} cannot be loaded: {error}") from error
    if "chat_template" in section:
        tokenizer.chat_template = section["chat_template"]
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        _LOGGER.warning("The tokenizer %r has no padding token: its end token pads", name)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_problems(config: RunConfig) -> ProblemSets:
    data = config.data
    has_criterion = config.is_supervised and config.sft.stop_pass_rate is not None
    num_validation = data.num_validation if has_criterion else 0
    if data.path is None:
        if data.heldout_path is not None:
            raise ValueError(f"data.heldout_path={data.heldout_path} needs data.path")
        return arithmetic_problems(
            max_number=data.max_number,
            num_heldout=data.num_heldout,
            num_validation=num_validation,
            careless_share=data.careless_share,
            seed=config.seed,
        )
    heldout = None
    if data.heldout_path is not None:
        heldout = read_problems(Path(data.heldout_path), key="data.heldout_path")
    return divide_problems(
        read_problems(Path(data.path), key="data.path"),
        heldout=heldout,
        num_heldout=data.num_heldout,
        num_validation=num_validation,
        seed=config.seed,
    )


def _check_lengths(config: RunConfig, problems: ProblemSets, *, encoder: ProblemEncoder) -> None:
    """Check that prompts leave room for completions, and that answers fit into them."""
    new = config.policy["generation"]["max_new_tokens"]
    measured = (*problems.train, *problems.heldout, *problems.validation)
    prompt, length = _longest(measured, map(len, encoder.prompt_tokens(measured)))
    for key, longest in _length_limits(config).items():
        if length + new > longest:
            raise ValueError(
                f"the prompt {prompt[:40]!r} has {length} tokens: with policy.generation."
                f"max_new_tokens={new} it exceeds {key}={longest}"
            )
    if config.is_supervised:
        _check_demonstrations(config, problems, encoder=encoder)
    if config.reward.answer_pattern is not None:
        return
    prompt, length = _longest(measured, map(len, encoder.answer_tokens(measured)))
    if length > new:
        raise ValueError(
            f"the answer to {prompt[:40]!r} has {length} tokens with the end token, more than "
            f"policy.generation.max_new_tokens={new}: no completion can be right"
        )


def _length_limits(config: RunConfig) -> dict[str, int]:
    """Return how long a prompt with its completion may be, by the key that says so."""
    limits = {"policy.max_total_sequence_length": config.policy["max_total_sequence_length"]}
    engine = config.policy["generation"].get("vllm_cfg") or {}
    if config.has_engines and engine.get("max_model_len") is not None:
        # An engine would end completions there, as if the policy had not come to an end.
        limits["policy.generation.vllm_cfg.max_model_len"] = engine["max_model_len"]
    return limits


def _check_demonstrations(
    config: RunConfig, problems: ProblemSets, *, encoder: ProblemEncoder
) -> None:
    """Check that the supervised part can train on every row that it may draw."""
    longest = config.sft_policy()["max_total_sequence_length"]
    rows = problems.demonstrations
    prompts, answers = encoder.prompt_tokens(rows), encoder.answer_tokens(rows)
    lengths = (len(each) + len(other) for each, other in zip(prompts, answers, strict=True))
    prompt, length = _longest(rows, lengths)
    if length > longest:
        key = "sft.policy" if "max_total_sequence_length" in config.sft.policy else "policy"
        raise ValueError(
            f"the prompt {prompt[:40]!r} and its answer have {length} tokens, more than "
            f"{key}.max_total_sequence_length={longest}"
        )


def _longest(problems: Iterable[Problem], lengths: Iterable[int]) -> tuple[str, int]:
    problem, length = max(zip(problems, lengths, strict=True), key=lambda pair: pair[1])
    return problem.prompt, length


def _check_backend(config: RunConfig) -> None:
    """Let the backend check the sections `policy` that the run is going to use."""
    policies: list[dict[str, Any]] = []
    if config.recipe == "grpo":
        policies.append(config.policy)
    if config.is_supervised:
        policies.append(config.sft_policy())
    worker_class = backends.load(backends.enabled_backend(config.policy))
    world_size = sum(config.cluster.bundle_ct_per_node_list)
    with tempfile.TemporaryDirectory() as directory:
        if config.has_builtin_model:
            # The backend reads the shape of the model, which is not built yet, from a directory.
            length = config.policy["max_total_sequence_length"]
            tiny_model_config(config.tiny_model, max_sequence_length=length).save_pretrained(
                directory
            )
            policies = [{**policy, "model_name": directory} for policy in policies]
        for policy in policies:
            worker_class.validate_config(policy, world_size=world_size, init_optimizer=True)
