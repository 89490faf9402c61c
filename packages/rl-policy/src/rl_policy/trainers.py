"""Trainers for Python programs and notebooks: a run of a recipe in three lines.

    from rl_policy import GRPOTrainer

    trainer = GRPOTrainer(model="my-model", data="problems.jsonl", reward=my_function)
    trainer.train()

It is the run that `rl-policy grpo` carries out, with the same configuration, directory, checkpoints
and metrics, and either continues what the other began.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

from rich.console import Console
from rl_interfaces import Environment, GenerationInterface

from rl_policy.config import (
    RunConfig,
    Settings,
    join_settings,
    nest,
    new_run_config,
    override_resumed_with,
    read_yaml,
)
from rl_policy.data.datasets import Problem
from rl_policy.data.messages import Message, read_prompt
from rl_policy.data.rewards import GivenReward
from rl_policy.data.rows import GivenRows
from rl_policy.environments.pool import GivenEnvironment
from rl_policy.policy import PathLike
from rl_policy.ray.cluster import SESSION
from rl_policy.recipes import find_recipe
from rl_policy.run.directory import (
    RunDirectory,
    new_run_path,
    require_new_directory,
    write_directory,
)
from rl_policy.run.export import export_checkpoint, initial_model
from rl_policy.run.inputs import RunInputs, check_prompts, prepare_inputs
from rl_policy.run.metrics import Row, RunDisplay
from rl_policy.run.samplers import open_sampler
from rl_policy.run.session import (
    RunSummary,
    Session,
    execute,
    num_logical_cpus,
    open_cluster,
    open_policy,
)

TrainerT = TypeVar("TrainerT", bound="RecipeTrainer")

Data: TypeAlias = (
    PathLike
    | Sequence[str]
    | Iterable[Mapping[str, Any]]
    | Callable[[], Iterable[Mapping[str, Any]]]
)
"""Where a trainer's data comes from: a file, several, the name of a dataset; or rows: a list, a
`datasets.Dataset`, a generator, or a function that returns one."""

EnvironmentLike: TypeAlias = str | Callable[[], Environment]
"""An environment: a class with `reset` and `step`, or `FILE.py:NAME`, `PACKAGE.MODULE:NAME`."""

RewardLike: TypeAlias = str | Callable[[list[str], list[Problem]], Any]
"""A reward: a function of completions and problems, or `FILE.py:NAME`, `PACKAGE.MODULE:NAME`."""


class RecipeTrainer:
    """A run of the recipe that a subclass names.

    Everything is checked when it is created, before a process starts. Each call starts the
    processes that it needs and ends them; inside `with` they stay for the calls that follow.

    Example, for a recipe that another package registers:
        class MyTrainer(RecipeTrainer):
            recipe = "mine"

    Args:
        model: Name or directory of the model. None: that of `config`, or the tiny one built here.
        data: What is trained on, see `Data`; what a row holds is the recipe's to say. None: that of
            `config`, or the recipe's own.
        reward: A function, or several, whose rewards are added up (`reward.weights`). It is called
            with a list of completions and one of `Problem`, and may be async. None: 1 where the
            completion is the answer.
        environment: What the policy talks to over several turns, and is rewarded by; in the place
            of a reward. A class, or a function without arguments, that gives an
            `rl_interfaces.Environment`, is called in this program; one that is named has processes
            of its own. None: a completion is all there is.
        heldout: What is only measured. None: a part of the data is held out.
        config: Further keys, nested or dotted: `{"policy": {...}, "grpo.steps": 20}`; or a YAML
            file with them. The keys are those that `rl-policy NAME --show-config` prints.
        out: The run directory, which must not exist. None: a new dated one in `runs/`.
        resume: The directory of a run to continue. `config` may then hold the number of steps,
            `cluster.restarts`, `cluster.fork_workers`, `logger` and `checkpoint.*` alone; data and
            rewards are those of the run, save functions and classes, which have to be given again.
        progress: Whether to show bars.

    Raises:
        ValueError: The run is not possible; the message names keys and numbers.
    """

    recipe: ClassVar[str]

    def __init__(
        self,
        model: str | None = None,
        data: Data | None = None,
        reward: RewardLike | Sequence[RewardLike] | None = None,
        *,
        environment: EnvironmentLike | None = None,
        heldout: Data | None = None,
        config: Mapping[str, Any] | PathLike | None = None,
        out: PathLike | None = None,
        resume: PathLike | None = None,
        progress: bool = True,
    ) -> None:
        sections = find_recipe(self.recipe).sections
        for key, value in {"reward": reward, "environment": environment}.items():
            if value is not None and key not in sections:
                raise ValueError(f"{key}={value!r}: the recipe {self.recipe!r} has no {key}s")
        functions = None if reward is None else _functions(reward)
        talks_to = None if environment is None else _environment(environment)
        sources = {"data.path": data, "data.heldout_path": heldout}
        given: Settings = {
            key: _source(value, key=key) for key, value in sources.items() if value is not None
        }
        if model is not None:
            given["policy.model_name"] = os.fspath(model)
        further = read_yaml(Path(config)) if isinstance(config, str | os.PathLike) else config
        if resume is None:
            if functions is not None:
                given["reward.function"] = functions
            if talks_to is not None:
                given["environment.function"] = talks_to
            resolved = new_run_config(self.recipe, join_settings(nest(further or {}), nest(given)))
            directory = RunDirectory(new_run_path(self.recipe) if out is None else Path(out))
            directory.require_new()
        else:
            directory = RunDirectory(Path(resume))
            if contradicting := [*given, *([] if out is None else ["out"])]:
                raise ValueError(
                    f"{contradicting[0]} contradicts resume={resume}: the run has its own"
                )
            resolved = override_resumed_with(
                self._read_config(directory, functions, talks_to), nest(further or {})
            )
        self._directory = directory
        self._is_created = resume is not None
        self._inputs = prepare_inputs(resolved)
        if resume is not None:
            directory.check_data(self._inputs.digests(), path=resolved.data.path)
        self._display = RunDisplay(Console(stderr=True, quiet=not progress))
        self._held: ExitStack | None = None
        self._source: GenerationInterface | None = None

    def _read_config(
        self,
        directory: RunDirectory,
        functions: list[str | GivenReward] | None,
        environment: str | GivenEnvironment | None,
    ) -> RunConfig:
        resolved = directory.read_config(functions=functions, environment=environment)
        if resolved.recipe != self.recipe:
            raise ValueError(
                f"resume={directory.path} is a run of {resolved.recipe!r}, and "
                f"{type(self).__name__} is of {self.recipe!r}"
            )
        return resolved

    @property
    def config(self) -> RunConfig:
        """The complete configuration."""
        return self._inputs.config

    @property
    def directory(self) -> Path:
        """The run's directory, which the first call creates."""
        return self._directory.path

    def train(self) -> RunSummary:
        """Take the steps that are left, and leave the model in `final/` of the run's directory.

        A call that was interrupted is continued by the next one, from the newest checkpoint.

        Returns:
            Steps, scores, seconds and where the model is.

        Raises:
            RewardError: A reward function failed; a checkpoint was saved first.
        """
        self._create_directory()
        self._release()
        return execute(self._inputs, self._directory, display=self._display)

    def evaluate(self) -> Row:
        """Return what the recipe measures on held-out data, as a row of `metrics.jsonl`.

        It is measured on the model of the newest checkpoint, or the one that the run starts from.

        Raises:
            NotImplementedError: The recipe measures nothing apart from its steps.
        """
        measure = find_recipe(self.recipe).measure
        if measure is None:
            raise NotImplementedError(f"the recipe {self.recipe!r} measures nothing by itself")
        self._create_directory()
        self._release()
        config = self.config
        # The samples that the report shows are those of the run's own evaluations.
        unrecorded = config.report.model_copy(update={"samples": 0})
        inputs = replace(self._inputs, config=config.model_copy(update={"report": unrecorded}))
        with self._session(inputs) as session:
            return measure(session, initial_model(session)).row()

    def generate(
        self, prompts: Sequence[str | list[Message]], *, greedy: bool = False
    ) -> list[str]:
        """Return a completion of each prompt, by the model that `evaluate` measures.

        Args:
            prompts: Texts, or conversations for the tokenizer's chat template: lists of messages
                with `role` and `content`. Sampled as `policy.generation` says.
            greedy: Take the most likely token every time.

        Raises:
            ValueError: A prompt is none, or does not fit; names it and the key.
        """
        read = (read_prompt(each, f"prompts[{index}]") for index, each in enumerate(prompts))
        problems = [
            Problem(text, messages=messages, place=f"prompts[{index}]")
            for index, (text, messages) in enumerate(read)
        ]
        if not problems:
            return []
        if "generation" not in self.config.policy:
            raise ValueError("policy.generation is not set: the model gives scores, or no samples")
        check_prompts(self.config, problems, encoder=self._inputs.encoder)
        with self._sampling() as source:
            generated = source.generate(self._inputs.encoder.prompt_batch(problems), greedy=greedy)
        return self._inputs.encoder.completion_texts(generated)

    def save(self, path: PathLike) -> None:
        """Write the trained model as a directory that `from_pretrained` loads.

        Args:
            path: The directory, which must not exist.

        Raises:
            ValueError: It exists, or nothing was trained yet.
        """
        out = Path(path)
        require_new_directory(out, key="path")
        if self._directory.final.is_dir():
            out.parent.mkdir(parents=True, exist_ok=True)

            def copy(partial: Path) -> None:
                shutil.copytree(self._directory.final, partial)

            write_directory(out, copy)
            return
        self._release()
        with self._session() as session:
            export_checkpoint(session, out)

    def close(self) -> None:
        """End all processes that `with` has kept. May be called again."""
        self._release()
        SESSION.leave(id(self))

    def __enter__(self: TrainerT) -> TrainerT:
        """Keep Ray, and the processes of `generate`, until the end of the block."""
        SESSION.enter(id(self), num_cpus=num_logical_cpus(self.config))
        self._held = ExitStack()
        return self

    def __exit__(self, *exception: object) -> None:
        """End them."""
        self.close()
        self._held = None

    def _create_directory(self) -> None:
        if not self._is_created:
            self._directory.create(self.config)
            self._directory.keep_data(self._inputs.digests())
            self._is_created = True

    def _release(self) -> None:
        """End the processes that sample."""
        self._source = None
        if self._held is not None:
            self._held.close()

    @contextmanager
    def _session(self, inputs: RunInputs | None = None) -> Iterator[Session[Any]]:
        with open_cluster(self.config) as cluster:
            yield Session(
                inputs=inputs or self._inputs,
                directory=self._directory,
                cluster=cluster,
                display=self._display,
            )

    @contextmanager
    def _sampling(self) -> Iterator[GenerationInterface]:
        """Yield what samples: inside `with` the same for all calls until the next training."""
        if self._source is not None:
            yield self._source
            return
        self._create_directory()
        with ExitStack() as stack:
            source = stack.enter_context(self._open_source())
            if self._held is not None:
                self._source = source
                self._held.push(stack.pop_all())
            yield source

    @contextmanager
    def _open_source(self) -> Iterator[GenerationInterface]:
        with self._session() as session:
            model = initial_model(session)
            with (
                open_policy(
                    session, self.config.policy, model=model, has_reference=False, is_trained=False
                ) as (policy, start),
                open_sampler(session, policy, model=model, start=start) as sampler,
                sampler.after_step(start.step) as source,
            ):
                yield source


class GRPOTrainer(RecipeTrainer):
    """GRPO on problems with rewards, see `rl_policy.recipes.grpo`.

    Example:
        def share_of_right_digits(completions, problems):
            return [score(each, problem.answer) for each, problem in zip(completions, problems)]

        problems = [{"prompt": "27+35=", "answer": "62"}, ...]
        with GRPOTrainer("my-model", problems, reward=share_of_right_digits) as trainer:
            trainer.train()
            trainer.generate(["12+13="])  -> ["25"]
    """

    recipe = "grpo"


class PPOTrainer(RecipeTrainer):
    """PPO with a value model on problems with rewards, see `rl_policy.recipes.ppo`.

    Example:
        PPOTrainer("my-model", "problems.jsonl", reward=share_of_right_digits).train()
    """

    recipe = "ppo"


class SFTTrainer(RecipeTrainer):
    """Supervised fine-tuning on prompts and answers, see `rl_policy.recipes.sft`.

    Example:
        SFTTrainer("my-model", "conversations.jsonl", config={"sft.steps": 100}).train()
    """

    recipe = "sft"


class DistillationTrainer(RecipeTrainer):
    """On-policy distillation from a teacher, see `rl_policy.recipes.distill`.

    Example:
        DistillationTrainer("small", "problems.jsonl", config={"distill.teacher": "large"}).train()
    """

    recipe = "distill"


class DPOTrainer(RecipeTrainer):
    """Direct preference optimization on pairs of completions, see `rl_policy.recipes.dpo`.

    Example:
        pairs = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}, ...]
        DPOTrainer("my-model", pairs).train()
    """

    recipe = "dpo"


class RewardTrainer(RecipeTrainer):
    """A reward model from pairs of completions, see `rl_policy.recipes.reward_model`.

    Example:
        pairs = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}, ...]
        RewardTrainer("my-model", pairs).train()
    """

    recipe = "rm"


def _source(data: Data, *, key: str) -> str | list[str] | GivenRows:
    """Return data as the configuration has it."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    if isinstance(data, Sequence) and data and all(isinstance(each, str) for each in data):
        return [str(each) for each in data]
    if not callable(data) and not isinstance(data, Iterable):
        raise ValueError(f"{key}={data!r} must be a path, rows, or a function that returns rows")
    return GivenRows(data, key=key)  # pyright: ignore[reportArgumentType] # it checks each row


def _environment(environment: EnvironmentLike) -> str | GivenEnvironment:
    return environment if isinstance(environment, str) else GivenEnvironment(environment)


def _functions(reward: RewardLike | Sequence[RewardLike]) -> list[str | GivenReward]:
    listed = [reward] if isinstance(reward, str) or callable(reward) else list(reward)
    return [each if isinstance(each, str) else GivenReward(each) for each in listed]
