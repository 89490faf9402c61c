"""One vLLM engine in this process. A plain class: Ray is not known here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_refit.private_directory import PrivateDirectory
from rl_refit.vllm import finish_update, on_workers, start_update
from transformers import AutoConfig

from rl_policy.backends import BackendNotInstalledError
from rl_policy.generation.rows import Completion, assemble_output
from rl_policy.generation.state import TAGS, EngineState, WeightState
from rl_policy.generation.vllm import worker_side
from rl_policy.generation.vllm.arguments import (
    engine_arguments,
    prepare_environment,
    request_arguments,
)

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces.backend.generation import SamplingConfig
    from transformers import PreTrainedTokenizerBase

    from rl_policy.generation.vllm.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What is known of an engine once it has started."""

    process_id: int
    """The process that holds it."""
    max_model_len: int
    """Most tokens per row, prompt and completion."""
    vocab_size: int
    """Tokens that a prompt may hold."""


class BundleHolder:
    """Keeps a device for an engine that runs from another rank: every call does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _do_nothing


def start_on_rank(config: EngineConfig, *args: Any) -> VllmEngine | BundleHolder:
    """Return the engine on the first rank of each tensor-parallel group, a holder on the others.

    Args:
        config: How the engine runs.
        args: What else `VllmEngine` takes.
    """
    index, position = divmod(int(os.environ["RANK"]), config.tensor_parallel_size)
    return BundleHolder() if position else VllmEngine(config, *args, engine_index=index)


def require_vllm() -> None:
    """Raise `ImportError`, with the remedy, unless vLLM is installed. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        raise BackendNotInstalledError(
            'The "vllm" generation backend is not installed. '
            'Install it with: pip install "rl-policy[vllm]"'
        )


class VllmEngine:
    """A vLLM engine: it samples, sleeps, and takes new weights.

    Args:
        config: How it runs.
        tokenizer: Finds stop strings in the text of a completion.
        engine_index: Which of the engines this is, from 0.

    Raises:
        ImportError: vLLM is not installed.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        engine_index: int = 0,
    ) -> None:
        require_vllm()
        prepare_environment(config.tensor_parallel_size)
        self._config = config
        self._first_receiver = engine_index * config.tensor_parallel_size
        self._state = EngineState()
        self._arrived: set[str] = set()
        vllm, platform = import_module("vllm"), import_module("vllm.platforms").current_platform
        self._make_parameters = vllm.SamplingParams
        self._can_sleep = config.is_colocated and platform.is_sleep_mode_available()
        with _saved_tokenizer(tokenizer, config) as directory:
            arguments = engine_arguments(
                config,
                tokenizer=directory,
                enable_sleep_mode=self._can_sleep,
                is_cpu=platform.is_cpu(),
            )
            self._llm: Any = vllm.LLM(**arguments)

    def describe(self) -> EngineFacts:
        """Return what is known of the engine."""
        model = self._llm.llm_engine.model_config
        return EngineFacts(
            process_id=os.getpid(),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
        )

    def generate(
        self, data: BatchedDataDict[Any], *, sampling: SamplingConfig, greedy: bool
    ) -> BatchedDataDict[Any]:
        """Return a completion per row, see `assemble_output`.

        Args:
            data: `input_ids`, `input_lengths`, `sampling_seeds` (`[rows]` int64) and, where rows
                have stop strings of their own, `stop_strings`.
            sampling: How completions are sampled.
            greedy: Take the most likely token.

        Raises:
            EngineStateError: The engine sleeps, or its weights are not whole.
        """
        self._state.require_generate()
        lengths = data["input_lengths"].tolist()
        prompts = [
            row[:length].tolist() for row, length in zip(data["input_ids"], lengths, strict=True)
        ]
        arguments = request_arguments(
            sampling,
            prompt_lengths=lengths,
            seeds=data["sampling_seeds"].tolist(),
            stop_strings=data.get("stop_strings") or [None] * len(lengths),
            max_length=self._llm.llm_engine.model_config.max_model_len,
            greedy=greedy,
        )
        assert sampling.pad_token_id is not None, "parsing has resolved it"
        return assemble_output(
            prompts,
            self._complete(prompts, arguments),
            pad_token_id=sampling.pad_token_id,
            weight_version=self._state.version,
        )

    def sleep(self) -> None:
        """Give the device's memory away, where the device lets vLLM do so.

        A refit that is in flight is given up: the weights are lost until the next full one.
        """
        if self._state.weights is not WeightState.COMMITTED:
            self._on_workers(import_module("rl_refit.vllm").abandon)
        level = self._config.sleep_level
        asleep = self._state.asleep()
        self._state.sleep(level=level)
        if self._can_sleep and len(asleep) < len(TAGS):
            if "weights" in asleep:
                # Without its weights vLLM takes an engine for one that sleeps as a whole.
                self._llm.wake_up(["weights"])
            self._llm.sleep(level=level)

    def wake(self, tags: Sequence[str] | None) -> bool:
        """Take the memory behind `tags` back, None for all; True when all of it is there."""
        asleep = self._state.asleep(tags)
        if asleep and self._can_sleep:
            self._llm.wake_up(asleep)
        self._state.wake(asleep)  # where there was room for it
        return not self._state.asleep()

    def init_transfer(self, addresses: Sequence[Mapping[str, Any]], *, timeout_s: float) -> None:
        """Learn where weights are going to come from.

        Args:
            addresses: The sender's address for each receiver of each engine.
            timeout_s: Most seconds that a refit may wait.
        """
        last = self._first_receiver + self._config.tensor_parallel_size
        info = {
            "address": [dict(address) for address in addresses[self._first_receiver : last]],
            "rank_offset": self._first_receiver,
            "timeout_s": timeout_s,
        }
        self._on_workers("init_weight_transfer_engine", info)

    def begin_update(self, version: int) -> None:
        """Get ready for all weights of `version`; nothing is sampled until they are committed."""
        self._state.begin_update(version)
        self._arrived.clear()
        with self._losing_weights_on_error(version):
            self._on_workers(start_update)

    def update(self, version: int) -> list[dict[str, float]]:
        """Receive and load every tensor, while the sender sends; return a report per receiver."""
        self._state.require_update("update", version)
        with self._losing_weights_on_error(version):
            self._on_workers("update_weights", {"version": version})
            finish_update(self._llm, version)
            reports = self._on_workers(import_module("rl_refit.vllm").last_report)
        self._state.receive()
        return reports

    def init_collective(self, ip: str, port: int, world_size: int, *, timeout_s: float) -> None:
        """Meet the trainer, which is rank 0, at an address of it."""
        first_rank = 1 + self._first_receiver
        self._on_workers(worker_side.join_group, ip, port, world_size, first_rank, timeout_s)

    def update_from_collective(self, info: Mapping[str, Any]) -> None:
        """Receive and load every tensor of `info`, while the trainer broadcasts."""
        self._load_by_name(worker_side.load_from_group, info, names=info, expected=info)

    def update_from_handles(
        self, handles: Mapping[str, Mapping[str, Any]], expected: Collection[str]
    ) -> None:
        """Load one group of tensors; all have arrived once each of `expected` has."""
        names = {name for group in handles.values() for name in group}
        self._load_by_name(worker_side.load_from_handles, handles, names=names, expected=expected)

    def commit_update(self, version: int) -> None:
        """Sample from the weights that arrived, from now on; nothing new the second time.

        All that can fail of a refit has been done in the update: where one of several engines
        fails, none is committed, and the same version can be sent again.
        """
        if self._state.has_committed(version):
            return
        self._state.require_commit(version)
        with self._losing_weights_on_error(version):
            if not self._arrived:
                self._on_workers(import_module("rl_refit.vllm").commit, version)
        self._state.commit()

    def shutdown(self) -> None:
        """End vLLM's own processes. Calling it twice is fine."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    def _load_by_name(
        self,
        load: Callable[..., None],
        argument: Any,
        *,
        names: Collection[str],
        expected: Collection[str],
    ) -> None:
        version = self._state.incoming
        self._state.require_update("update_weights", version)
        with self._losing_weights_on_error(version):
            self._on_workers(load, argument)
            self._arrived.update(names)
            if self._arrived.issuperset(expected):
                finish_update(self._llm, version)
                self._state.receive()

    def _on_workers(self, call: str | Callable[..., Any], *args: Any) -> list[Any]:
        return on_workers(self._llm, call, *args)

    def _complete(
        self, prompts: list[list[int]], arguments: list[dict[str, Any]]
    ) -> list[Completion]:
        if not prompts:
            return []
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self._make_parameters(**row) for row in arguments],
            use_tqdm=False,
        )
        completions = [output.outputs[0] for output in outputs]
        for completion in completions:
            assert len(completion.logprobs.logprobs) == len(completion.token_ids)
        return [
            Completion(token_ids=entry.token_ids, logprobs=entry.logprobs.logprobs)
            for entry in completions
        ]

    @contextmanager
    def _losing_weights_on_error(self, version: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._state.lose(f"the refit to version {version} failed ({error})")
            raise


@contextmanager
def _saved_tokenizer(tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> Iterator[str]:
    """Yield a directory with the tokenizer, and with the model's config, which vLLM looks for."""
    model = AutoConfig.from_pretrained(
        config.model_name, trust_remote_code=config.trust_remote_code
    )
    # Removed by the next engine that starts, where this one is killed.
    with PrivateDirectory("rl-policy-vllm-") as directory:
        tokenizer.save_pretrained(directory.path)
        model.save_pretrained(directory.path)
        yield str(directory.path)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take any arguments and return None."""
