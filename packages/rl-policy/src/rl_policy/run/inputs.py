"""What a run works with: configuration, tokenizer and data, checked before anything starts."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from rl_interfaces import AdapterSendingWorker
from rl_interfaces.backend.checkpoint.hf_files import cannot_be_loaded
from rl_interfaces.backend.end_tokens import end_token_ids
from rl_interfaces.backend.generation import SamplingConfig
from rl_interfaces.backend.torch_optim import check_schedule_length, parse_scheduler
from rl_interfaces.config.schema import check_typed_dict
from rl_refit.transports import expandable_segments, find_transport
from transformers import AutoConfig, PreTrainedTokenizerBase

from rl_policy import backends
from rl_policy.config import (
    BUILTIN_MODEL,
    EXACT_MATCH,
    EnvironmentSection,
    RefitSection,
    RewardSection,
    RunConfig,
    Settings,
    naming_section,
)
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.datasets import (
    ExactMatch,
    PreferencePair,
    Problem,
    ProblemSets,
    arithmetic_problems,
    divide_problems,
    read_problems,
)
from rl_policy.data.items import count_repeated, first_items, frozen, select, sources_of
from rl_policy.data.overlong import (
    drop_overlong,
    find_overlong,
    refuse_overlong,
    report_overlong,
)
from rl_policy.data.rewards import (
    GivenReward,
    Reward,
    RewardFunction,
    WeightedRewards,
    is_solved_share,
)
from rl_policy.data.tiny_model import build_tokenizer, tiny_model_config
from rl_policy.environments.pool import open_pool, probe
from rl_policy.environments.rollouts import Episode, EpisodePlayer, take_prompt
from rl_policy.generation.vllm.config import (
    VllmSection,
    complete_section,
    generation_of_policy,
)
from rl_policy.generation.vllm.quantized import block_fp8_tensors
from rl_policy.recipes import find_recipe
from rl_policy.run.limits import check_data, check_policies
from rl_policy.run.machine import check_devices, check_model_files, model_config
from rl_policy.run.trackers import check_trackers

if TYPE_CHECKING:
    from rl_interfaces import PolicyWorker

ItemT = TypeVar("ItemT", Problem, PreferencePair)

_LOGGER = logging.getLogger(__name__)

# Of rows that are all alike.
_LOOKED_AT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """The configuration, and what follows from it alone. A recipe derives its own inputs from it.

    Attributes:
        config: Of the run.
        encoder: Turns texts into batches, under the model's tokenizer.
    """

    config: RunConfig
    encoder: ProblemEncoder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    def digests(self) -> Mapping[str, str]:
        """Return a text by set of rows that changes if its rows do; a resumed run needs the same.

        Empty by default; a recipe that has rows returns theirs.
        """
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemInputs(RunInputs):
    """The inputs of recipes on problems with verifiable answers.

    Attributes:
        problems: Divided into what is trained on and what is measured.
        reward: Returns the reward of each completion of the problem at the same index.
        episodes: Plays episodes in the place of completions. None: the run has no environment.
    """

    problems: ProblemSets
    reward: Reward
    episodes: EpisodePlayer | None = None

    def digests(self) -> Mapping[str, str]:
        """Return those of the problems."""
        return self.problems.digests()

    @property
    def measures_solved(self) -> bool:
        """Whether a mean reward is the share of the problems that are solved."""
        return self.episodes is None and is_solved_share(self.reward)


def prepare_inputs(config: RunConfig) -> RunInputs:
    """Return the inputs of a run; nothing is written, and no process but reward functions' starts.

    Raises:
        ValueError: The configuration cannot be run; the message names keys and numbers, or file
            and line.
    """
    recipe = find_recipe(config.recipe)
    check_trackers(config.logger)
    check_devices(config)
    check_model_files(config.policy)
    encoder = load_encoder(config)
    encoder.check_template()
    policies = recipe.policies(config)
    _check_backend(config, policies)
    check_policies(policies)
    # After the backend, as it reads files of any size.
    inputs = recipe.prepare(config, encoder)
    check_data(config, inputs)
    check_engines(config)
    return inputs


def load_encoder(config: RunConfig) -> ProblemEncoder:
    """Return the encoder of a run, under its model's tokenizer.

    Raises:
        ValueError: The tokenizer cannot be loaded, or lacks a token.
    """
    tokenizer = _load_tokenizer(config)
    _check_tokens(config, tokenizer)
    generation: Settings = config.policy.get("generation") or {}
    ends = end_token_ids(
        None if config.has_builtin_model else config.policy["model_name"],
        tokenizer,
        trust_remote_code=config.policy["trust_remote_code"],
    )
    return ProblemEncoder(
        tokenizer,
        use_chat_template=config.data.use_chat_template,
        system_prompt=config.data.system_prompt,
        template_arguments=config.data.chat_template_kwargs,
        stop_token_ids=(*ends, *generation.get("stop_token_ids", ())),
        stop_strings=generation.get("stop_strings", ()),
    )


def prepare_problems(
    config: RunConfig,
    encoder: ProblemEncoder,
    *,
    num_validation: int | None = 0,
    imitates_answers: bool = False,
    is_measured_only: bool = False,
    has_environment: bool = False,
) -> ProblemInputs:
    """Return the problems of a run and their reward, checked against the sequence lengths.

    Args:
        config: With the section `reward`.
        encoder: Of the run.
        num_validation: Prompts to hold out for the stopping criterion of a supervised part. None:
            the default for the number of prompts.
        imitates_answers: Whether answers are trained on, whatever the reward is.
        is_measured_only: Whether all problems of `data.path` are held out.
        has_environment: Whether an environment rewards episodes, and no answer is compared.

    Raises:
        ValueError: The problems cannot be read or divided, or do not fit.
    """
    section = config.section(RewardSection)
    problems = _load_problems(
        config,
        encoder,
        num_validation=num_validation,
        needs_answer=imitates_answers or (needs_answers(section) and not has_environment),
        is_measured_only=is_measured_only,
    )
    measured = first_items(problems.train, problems.heldout, problems.validation)
    encoder.check_conversations(measured, has_answers=False)
    problems = _fit_prompts(config, problems, encoder=encoder)
    check_shares(problems.train, config.data.weights)
    compares_all = section.function is None and section.answer_pattern is None
    if compares_all and not has_environment:
        for each in (problems.train, problems.heldout, problems.validation):
            _check_answers(config, each, encoder=encoder)
    # Last, as it starts the processes of reward functions.
    reward = build_reward(section)
    return ProblemInputs(config=config, encoder=encoder, problems=problems, reward=reward)


def warn_of_repeated(problems: Sequence[Problem]) -> None:
    """Log a warning if prompts to sample from are repeated, with the number of such rows."""
    if repeated := count_repeated(problems):
        _LOGGER.warning(
            "data.path: %d of %d rows have the prompt of an earlier row, and each is sampled from",
            repeated,
            len(problems),
        )


def prepare_episodes(config: RunConfig, inputs: ProblemInputs) -> ProblemInputs:
    """Return the inputs of a run with the player of its episodes; the same without an environment.

    Args:
        config: With the section `environment`.
        inputs: Of the run.

    Raises:
        ValueError: The environment cannot be loaded, no episode can start, or the chat template
            renders no observations.
    """
    section = config.section(EnvironmentSection)
    if section.function is None:
        return inputs
    problems = inputs.problems
    for each in (problems.train, problems.heldout):
        inputs.encoder.check_turns(each[:_LOOKED_AT], role=section.role)
    pool = open_pool(section.function, limit_s=section.timeout_s, max_groups=section.processes)
    try:
        started = Episode(0, problems.train[0])
        take_prompt(started, probe(pool, problems.train[0]))
        # Its messages may be the first that need a chat template.
        inputs.encoder.prompt_tokens([started.problem])
        inputs.encoder.check_turns([started.problem], role=section.role)
    except BaseException:
        pool.close()
        raise
    player = EpisodePlayer(
        pool=pool,
        encoder=inputs.encoder,
        max_turns=section.max_turns,
        max_length=min(_length_limits(config).values()),
        max_new_tokens=config.policy["generation"]["max_new_tokens"],
        role=section.role,
    )
    return replace(inputs, episodes=player)


def build_reward(section: RewardSection) -> Reward:
    """Return the reward that the section `reward` describes.

    Raises:
        ValueError: A function cannot be loaded, or keys contradict each other.
    """
    functions = section.functions
    names = [_short_name(each) for each in functions]
    if section.answer_pattern is not None and names and EXACT_MATCH not in names:
        raise ValueError(
            f"reward.answer_pattern={section.answer_pattern!r} is read by {EXACT_MATCH!r} alone: "
            f"add it to reward.function={names}, or leave the pattern out"
        )
    if section.weights is not None and len(section.weights) != len(names):
        raise ValueError(
            f"reward.weights={section.weights} gives {len(section.weights)} weights for the "
            f"{len(names)} functions of reward.function={names}"
        )
    if len(set(names)) != len(names):
        raise ValueError(
            f"reward.function={names} has two functions of one name, which is their column in the "
            "metrics: rename one"
        )
    exact = ExactMatch(section.answer_pattern)
    if not names:
        return exact
    found = {
        name: _open_function(function, exact, limit_s=section.timeout_s)
        for name, function in zip(names, functions, strict=True)
    }
    return WeightedRewards(found, section.weights or [1.0] * len(names))


def _open_function(function: str | GivenReward, exact: Reward, *, limit_s: float) -> Reward:
    if isinstance(function, GivenReward):
        return function.limited(limit_s)
    return exact if function == EXACT_MATCH else RewardFunction(function, limit_s=limit_s)


def _short_name(function: str | GivenReward) -> str:
    """Return the name of a function in the metrics."""
    return function.name if isinstance(function, GivenReward) else function.rpartition(":")[2]


def needs_answers(section: RewardSection) -> bool:
    """Return whether the reward compares a completion with the problem's answer."""
    return not section.functions or EXACT_MATCH in section.functions


def check_language_model(policy: Settings, *, path: str = "policy") -> None:
    """Raise `ValueError` unless a policy is a language model, whose log-probabilities are trained.

    Args:
        policy: The complete section.
        path: Its key.
    """
    if policy["head"] != "language_model":
        raise ValueError(
            f"{path}.head={policy['head']!r} gives scores, and the recipe trains "
            "log-probabilities: set 'language_model'"
        )


def check_schedule(policy: Settings, *, num_steps: int, key: str, path: str = "policy") -> None:
    """Raise `ValueError` if the learning-rate schedule of a policy ends before its training does.

    Args:
        policy: The section.
        num_steps: `train` calls, each of which takes a step of the schedule.
        key: The key that sets them.
        path: The section's path.
    """
    # Other backends have keys of their own: Megatron's schedules do not end.
    if not policy["dtensor_cfg"]["enabled"]:
        return
    schedule = parse_scheduler(policy.get("scheduler"), path=f"{path}.scheduler")
    if schedule is not None:
        check_schedule_length(schedule, num_steps=num_steps, key=key)


def check_sampling(config: RunConfig) -> None:
    """Raise `ValueError` unless the policy is a language model that can sample completions."""
    check_language_model(config.policy)
    if SamplingConfig.from_policy_config(config.policy) is None:
        raise ValueError("policy.generation is not set: the recipe samples completions")


def read_own_data(
    config: RunConfig,
    encoder: ProblemEncoder,
    read: Callable[..., Sequence[ItemT]],
    **options: object,
) -> tuple[Sequence[ItemT] | None, Sequence[ItemT] | None]:
    """Return the items of `data.path` and `data.heldout_path`, None for a path that is not set.

    Args:
        config: The run configuration.
        encoder: The encoder of the run.
        read: `read_problems`, or another function with its arguments.
        options: Further arguments of `read`.

    Raises:
        ValueError: Data cannot be read, only `data.heldout_path` is set, or neither is, for another
            model than the one that a run builds.
    """
    data = config.data
    if data.path is None and not (config.has_builtin_model or _has_builtin_tokens(encoder)):
        raise ValueError(
            f"policy.model_name={config.policy['model_name']!r} needs data.path, a file of JSON "
            "lines or the name of a dataset: only the model that is built here has data of its own"
        )
    if data.path is None and data.heldout_path is not None:
        raise ValueError(f"data.heldout_path={data.heldout_path} needs data.path")
    options |= {"columns": data.columns, "split": data.split}
    heldout = data.heldout_path
    return (
        None if data.path is None else read(data.path, key="data.path", **options),
        None if heldout is None else read(heldout, key="data.heldout_path", **options),
    )


def check_shares(
    train: Sequence[Problem] | Sequence[PreferencePair], weights: Sequence[float] | None
) -> None:
    """Raise `ValueError` if a source of `data.weights` has nothing left to train on.

    Args:
        train: What is trained on.
        weights: `data.weights`.
    """
    present = set(sources_of(train).tolist())
    for number, weight in enumerate(weights or ()):
        if number not in present:
            raise ValueError(
                f"data.weights[{number}]={weight:g} is the share of a source whose rows are all "
                "held out: lower data.num_heldout, or set data.heldout_path"
            )


def _has_builtin_tokens(encoder: ProblemEncoder) -> bool:
    """Return whether a model has the tokens of the built-in one, from which it was trained."""
    return encoder.tokenizer.get_vocab() == build_tokenizer().get_vocab()


def fit_answers(
    config: RunConfig, rows: Sequence[ItemT], *, encoder: ProblemEncoder, limit: int, key: str
) -> Sequence[ItemT]:
    """Return rows whose prompts and answers fit into a sequence, by `data.overlong`.

    Args:
        config: The run configuration.
        rows: Problems or preference pairs to train on.
        encoder: The encoder of the run. Its batches truncate if rows are to be truncated.
        limit: Most tokens of a sequence.
        key: The config key that says so.

    Raises:
        ValueError: A row is too long, and `data.overlong` is `error`; or none is left.
    """

    def problems_of(item: Problem | PreferencePair) -> Sequence[Problem]:
        return item.rows if isinstance(item, PreferencePair) else (item,)

    def longest(items: Sequence[Any], count: Callable[[list[Problem]], list[int]]) -> list[int]:
        flat = [problem for item in items for problem in problems_of(item)]
        lengths = iter(count(flat))
        return [max(next(lengths) for _ in problems_of(item)) for item in items]

    def whole(problems: list[Problem]) -> list[int]:
        return [len(each.tokens) for each in encoder.examples(problems)]

    def prompts(problems: list[Problem]) -> list[int]:
        return [each.prompt_length for each in encoder.examples(problems)]

    def describe(item: Problem | PreferencePair, length: int) -> str:
        return (
            f"the prompt {item.prompt[:40]!r} and its answer have {length} tokens, more than "
            f"{key}={limit}"
        )

    measure = partial(longest, count=whole)
    long_rows = find_overlong(rows, measure, limit=limit, overhead=_overhead(encoder))
    if config.data.overlong == "truncate" and long_rows:
        encoder.max_row_tokens = limit
        at = np.array([index for index, _ in long_rows])
        # Of which no token of the answer would be left.
        lengths = longest(select(rows, at), prompts)
        hopeless = [
            pair for pair, length in zip(long_rows, lengths, strict=True) if length >= limit
        ]
        report_overlong(rows, long_rows, mode="truncate", describe=describe)
        return drop_overlong(rows, hopeless, describe=describe)
    if config.data.overlong == "drop":
        return drop_overlong(rows, long_rows, describe=describe)
    refuse_overlong(rows, long_rows, describe=describe)
    return rows


def _fit_prompts(
    config: RunConfig, problems: ProblemSets, *, encoder: ProblemEncoder
) -> ProblemSets:
    """Return problems whose prompts leave room for a completion, by `data.overlong`."""
    new = config.policy["generation"]["max_new_tokens"]
    limits = _length_limits(config)
    key, longest = min(limits.items(), key=lambda item: item[1])
    describe = _describe_prompt(new=new, key=key, longest=longest)
    overhead = _overhead(encoder)

    def measure(items: Sequence[Problem]) -> list[int]:
        return [len(each) for each in encoder.prompt_tokens(items)]

    mode, limit = config.data.overlong, longest - new

    def fit(rows: Sequence[Problem]) -> Sequence[Problem]:
        if not rows:
            return rows
        long_rows = find_overlong(rows, measure, limit=limit, overhead=overhead, part="prompt")
        if mode == "drop":
            return drop_overlong(rows, long_rows, describe=describe)
        if mode == "error" or limit < 1:
            refuse_overlong(rows, long_rows, describe=describe)
        elif long_rows:
            encoder.max_prompt_tokens = limit
            report_overlong(rows, long_rows, mode=mode, describe=describe)
        return rows

    train = fit(problems.train)
    same = problems.demonstrations is problems.train
    return ProblemSets(
        train=train,
        heldout=fit(problems.heldout),
        validation=fit(problems.validation),
        demonstrations=train if same else problems.demonstrations,
    )


def _describe_prompt(*, new: int, key: str, longest: int) -> Callable[[Problem, int], str]:
    def describe(problem: Problem, length: int) -> str:
        return (
            f"the prompt {problem.prompt[:40]!r} has {length} tokens: with policy.generation."
            f"max_new_tokens={new} it exceeds {key}={longest}"
        )

    return describe


def _overhead(encoder: ProblemEncoder) -> int | None:
    """Return the tokens that a row has besides those of its texts; None if they are not known."""
    message = {"role": "user", "content": "a"}
    plain, rendered = Problem("a", "a"), Problem("a", "a", messages=(message,))
    has_template = bool(getattr(encoder.tokenizer, "chat_template", None))
    try:
        examples = encoder.examples([plain, rendered] if has_template else [plain])
        return max(len(each.tokens) for each in examples)
    except ValueError:
        return None


def _load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    section = config.policy["tokenizer"]
    name = section["name"]
    if config.has_builtin_model:
        tokenizer = build_tokenizer()
    else:
        key = "model_name" if name == config.policy["model_name"] else "tokenizer.name"
        tokenizer = read_tokenizer(
            name, key=f"policy.{key}", trust_remote_code=config.policy["trust_remote_code"]
        )
    if "chat_template" in section:
        tokenizer.chat_template = section["chat_template"]
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        _LOGGER.warning("The tokenizer %r has no padding token: its end token pads", name)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_missing_directory(model: str) -> bool:
    """Return whether a model is named as a directory is, and there is none."""
    return model.startswith((".", "/", "~")) and not Path(model).is_dir()


def read_tokenizer(name: str, *, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Args:
        name: Directory or name.
        key: The key that names it.
        trust_remote_code: Whether its own code may run.

    Raises:
        ValueError: It cannot be loaded; names the key.
    """
    # Here, as it imports the code of models, which takes a second.
    from transformers import AutoTokenizer

    if is_missing_directory(name):
        raise ValueError(f"{key}={name!r} is no directory")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises no class of its own for a file that is broken
        raise ValueError(cannot_be_loaded(key, name, error, part="a tokenizer")) from error


def check_vocabulary(policy: Settings, encoder: ProblemEncoder, *, key: str) -> int:
    """Check that another model has the run's tokens; return the size of its vocabulary.

    Args:
        policy: The complete section of the other model.
        encoder: Of the run.
        key: The key that names the model.

    Raises:
        ValueError: Its tokenizer cannot be loaded, or has other tokens.
    """
    name = policy["model_name"]
    tokenizer = read_tokenizer(name, key=key, trust_remote_code=policy["trust_remote_code"])
    own, other = encoder.tokenizer.get_vocab(), tokenizer.get_vocab()
    if own != other:
        different = sum(own.get(token) != id_ for token, id_ in other.items())
        raise ValueError(
            f"{key}={name!r} has another vocabulary than the model: {len(other)} tokens and "
            f"{len(own)}, {different} of the former are not the model's; a token of both must have "
            "one id"
        )
    return int(model_config(policy).get_text_config().vocab_size)


def _check_tokens(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the tokens of the section `generation` are in the vocabulary."""
    generation: Settings = config.policy.get("generation") or {}
    size = len(tokenizer)
    if not config.has_builtin_model:
        # The model may have rows beyond the tokenizer's, to be a round number.
        size = max(size, getattr(model_config(config.policy).get_text_config(), "vocab_size", size))
    ids = {
        f"stop_token_ids[{i}]": id_ for i, id_ in enumerate(generation.get("stop_token_ids", ()))
    }
    if "pad_token_id" in generation:
        ids["pad_token_id"] = generation["pad_token_id"]
    for key, token_id in ids.items():
        if token_id >= size:
            raise ValueError(
                f"policy.generation.{key}={token_id} is not in the vocabulary of {size} tokens"
            )


def _load_problems(
    config: RunConfig,
    encoder: ProblemEncoder,
    *,
    num_validation: int | None,
    needs_answer: bool,
    is_measured_only: bool,
) -> ProblemSets:
    data = config.data
    problems, heldout = read_own_data(config, encoder, read_problems, needs_answer=needs_answer)
    if problems is None:
        return arithmetic_problems(
            max_number=data.max_number,
            num_heldout=data.num_heldout,
            num_validation=num_validation,
            careless_share=data.careless_share,
            seed=config.seed,
        )
    if is_measured_only:
        heldout = frozen(problems)
        return ProblemSets(train=(), heldout=heldout, validation=(), demonstrations=())
    return divide_problems(
        problems,
        heldout=heldout,
        num_heldout=data.num_heldout,
        num_validation=num_validation,
        seed=config.seed,
    )


def check_prompts(
    config: RunConfig, problems: Sequence[Problem], *, encoder: ProblemEncoder
) -> None:
    """Raise `ValueError` unless every prompt leaves room for a completion.

    Args:
        config: Of the run.
        problems: With the prompts.
        encoder: Of the run.
    """
    new = config.policy["generation"]["max_new_tokens"]
    lengths = [len(each) for each in encoder.prompt_tokens(problems)]
    length, at = max((length, -index) for index, length in enumerate(lengths))
    for key, longest in _length_limits(config).items():
        if length + new > longest:
            raise ValueError(
                _describe_prompt(new=new, key=key, longest=longest)(problems[-at], length)
            )


def _check_answers(
    config: RunConfig, problems: Sequence[Problem], *, encoder: ProblemEncoder
) -> None:
    """Check that every answer fits into a completion, which is the answer and nothing else."""
    new = config.policy["generation"]["max_new_tokens"]
    (overhead,) = encoder.answer_lengths([Problem("a", "a")])
    for index, length in find_overlong(
        problems, encoder.answer_lengths, limit=new, overhead=overhead, part="answer"
    ):
        problem = problems[index]
        place = f"{problem.place}: " if problem.place else ""
        raise ValueError(
            f"{place}the answer to {problem.prompt[:40]!r} has {length} tokens with the end token, "
            f"more than policy.generation.max_new_tokens={new}: no completion can be right"
        )


def _length_limits(config: RunConfig) -> dict[str, int]:
    """Return the most tokens of a prompt with its completion, by the key that says so."""
    limits = {"policy.max_total_sequence_length": config.policy["max_total_sequence_length"]}
    longest = complete_section(config.policy["generation"])["max_model_len"]
    if config.has_engines and longest is not None:
        # The engine would truncate completions there, as if the policy had ended them itself.
        limits["policy.generation.vllm_cfg.max_model_len"] = longest
    return limits


def _check_backend(config: RunConfig, policies: Mapping[str, Settings]) -> None:
    """Let the backend validate the sections `policy` that the run is going to use, by path."""
    for path, policy in [("policy", config.policy), *policies.items()]:
        with naming_section(path):
            _load_backend(policy, path=path)
            backends.check_generation_backend(policy)
    world_size = sum(config.cluster.bundle_ct_per_node_list)
    with tempfile.TemporaryDirectory() as directory:
        if config.has_builtin_model:
            # The backend reads the shape of the model, which is not built yet, from a directory.
            length = config.policy["max_total_sequence_length"]
            tiny_model_config(config.tiny_model, max_sequence_length=length).save_pretrained(
                directory
            )
            policies = {
                path: {**policy, "model_name": directory}
                if policy["model_name"] == BUILTIN_MODEL
                else policy
                for path, policy in policies.items()
            }
        for path, policy in policies.items():
            with naming_section(path):
                _load_backend(policy, path=path).validate_config(
                    policy, world_size=world_size, init_optimizer=True
                )


def _load_backend(policy: Settings, *, path: str) -> type[PolicyWorker]:
    name = backends.enabled_backend(policy)
    try:
        return backends.load(name)
    except backends.BackendNotInstalledError as error:
        raise backends.BackendNotInstalledError(
            f"{path}.{name}_cfg.enabled=True: {error}"
        ) from error


def engine_section(config: RunConfig, *, model: str) -> Settings:
    """Return the `GenerationConfig` of the engines: the policy's, completed."""
    section = {**generation_of_policy(config.policy), "model_name": model}
    if sends_adapters(config):
        rank = config.policy["dtensor_cfg"]["lora"]["r"]
        section["vllm_cfg"] = {**section["vllm_cfg"], "adapter_rank": rank}
    return section


def sends_adapters(config: RunConfig) -> bool:
    """Return whether the engines get adapters apart from the weights that these belong to."""
    has_refits = RefitSection in find_recipe(config.recipe).sections.values()
    return has_refits and config.section(RefitSection).adapters == "alone"


def keeps_weights(config: RunConfig) -> bool:
    """Return whether engines that sleep still have their weights afterwards."""
    return complete_section(config.policy["generation"])["sleep_level"] == 1


def check_engines(config: RunConfig) -> None:
    """Let the engines validate their section, before anything starts.

    Raises:
        ValueError: Something it asks for cannot be done; the message names key and numbers.
        ImportError: The engines are not installed.
        NotImplementedError: The training backend does not send weights.
    """
    generation: Settings = config.policy.get("generation") or {}
    given, own = generation.get("model_name"), config.policy["model_name"]
    if given not in (None, own):
        raise ValueError(
            f"policy.generation.model_name={given!r} contradicts policy.model_name={own!r}: a run "
            "samples from the policy's weights"
        )
    check_typed_dict(
        generation.get("vllm_cfg") or {}, VllmSection, path="policy.generation.vllm_cfg"
    )
    sends_weights = RefitSection in find_recipe(config.recipe).sections.values()
    transport = config.section(RefitSection).transport if sends_weights else None
    if transport is not None:
        try:
            find_transport(transport)
        except ValueError as error:
            raise ValueError(f"refit.{error}") from error
    if not config.has_engines:
        return
    if sends_weights:
        _check_sending(config)
    uses_gpus = config.cluster.use_gpus
    check_shared_devices(
        transport,
        is_colocated=config.is_colocated,
        # The driver's machine stands for the others where the config leaves it to them.
        on_gpu=torch.cuda.is_available() if uses_gpus is None else uses_gpus,
        environment=os.environ,
    )
    engine_class: Any = backends.load_engine(config.policy["generation"]["backend"])
    if sends_weights:
        staging_mode(config, engine_class)
    section = engine_section(config, model=config.policy["model_name"])
    engine_class.validate_config(section)
    if not config.has_builtin_model:
        _check_positions(section)
    engine = complete_section(section)
    _check_bundles(config, tensor_parallel_size=engine["tensor_parallel_size"])
    if sends_weights and not engine["weight_transfer"]:
        raise ValueError(
            "policy.generation.vllm_cfg.weight_transfer=False: a run gives its engines new weights"
        )


def _check_sending(config: RunConfig) -> None:
    backend = backends.TrainingBackend.of_config(config.policy)
    backend.require_sending()
    is_quantized = not config.has_builtin_model and block_fp8_tensors(
        config.policy["model_name"], trust_remote_code=config.policy["trust_remote_code"]
    )
    if is_quantized and sends_adapters(config):
        raise ValueError(
            f"refit.adapters='alone' contradicts policy.model_name={config.policy['model_name']!r}:"
            " engines hold it in block-FP8, and are sent merged weights; set it to 'merged'"
        )
    if sends_adapters(config):
        try:
            backend.require(AdapterSendingWorker, lack="send adapters alone")
        except NotImplementedError as error:
            raise ValueError(
                f"refit.adapters='alone' is not possible, set it to 'merged': {error}"
            ) from error


def staging_mode(config: RunConfig, engine_class: type) -> str:
    """Return where engines receive weights while they sample: `refit.staging`, or "off".

    Args:
        config: Of a run with engines.
        engine_class: Theirs.

    Raises:
        ValueError: `refit.staging` is "host", which these engines cannot do.
    """
    staging = config.section(RefitSection).staging
    if config.is_colocated:
        # They sleep while the policy has the device.
        reason = "contradicts policy.generation.colocated.enabled=True"
    elif not hasattr(engine_class, "update_metrics"):
        reason = f"is not possible with {engine_class.__name__}, which pauses for a refit"
    else:
        return staging
    if staging == "host":
        raise ValueError(f"refit.staging='host' {reason}: set it to 'auto' or 'off'")
    return "off"


def check_shared_devices(
    transport: str | None, *, is_colocated: bool, on_gpu: bool, environment: Mapping[str, str]
) -> None:
    """Raise `ValueError` for what cannot be where a policy and engines share GPUs.

    Args:
        transport: `refit.transport`; None: the fastest that reaches the engines.
        is_colocated: Whether they share devices.
        on_gpu: Whether the devices are GPUs.
        environment: Of the processes.
    """
    if not (is_colocated and on_gpu):
        return
    if transport == "collective":
        raise ValueError(
            "refit.transport='collective' with policy.generation.colocated.enabled=True: NCCL "
            "refuses two ranks on one GPU, leave refit.transport out or set it to 'cuda_ipc'"
        )
    if (setting := expandable_segments(environment)) is not None:
        raise ValueError(
            f"{setting} in the environment with policy.generation.colocated.enabled=True: vLLM's "
            "engines cannot sleep with such memory, nor does refit.transport='cuda_ipc' export it: "
            "unset it, or give the engines devices of their own"
        )


def _check_positions(section: Settings) -> None:
    """Check that the model has a position for each token of the longest row.

    vLLM refuses the same when an engine starts, which is after the policy's workers have. Scaled
    positions are left to it: how far they reach depends on the kind of scaling.
    """
    engine = complete_section(section)
    longest = engine["max_model_len"]
    is_overridden = "hf_overrides" in engine["engine_kwargs"]
    if longest is None or is_overridden or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return
    model = AutoConfig.from_pretrained(
        section["model_name"], trust_remote_code=engine["trust_remote_code"]
    ).get_text_config()
    rotary: Settings = getattr(model, "rope_parameters", None) or {}
    # Some models have a section for each kind of layer.
    sections = [each for each in rotary.values() if isinstance(each, Mapping)] or [rotary]
    if any(each.get("rope_type", "default") != "default" for each in sections):
        return
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ValueError(
            f"policy.generation.vllm_cfg.max_model_len={longest}, which is "
            "policy.max_total_sequence_length where it is not set, exceeds the model's "
            f"max_position_embeddings={positions}"
        )


def _check_bundles(config: RunConfig, *, tensor_parallel_size: int) -> None:
    if config.is_colocated:
        key, bundles = "cluster.bundle_ct_per_node_list", config.cluster.bundle_ct_per_node_list
    else:
        key, bundles = "policy.generation.colocated.resources", config.engine_bundles
    if not bundles or min(bundles) < 1:
        raise ValueError(f"{key} asks for {bundles} devices by node: an engine needs one")
    for count in bundles:
        if count % tensor_parallel_size:
            raise ValueError(
                f"policy.generation.vllm_cfg.tensor_parallel_size={tensor_parallel_size} does not "
                f"divide the {count} devices that a node has by {key}"
            )
