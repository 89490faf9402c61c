"""One vLLM engine in this process: it samples, sleeps, is refitted, and serves clients.

An engine is a plain class: Ray is not known here, and vLLM is imported when an engine starts.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rl_refit.vllm import (
    ADAPTER_ID,
    KvCache,
    forget_base,
    on_workers,
    start_adapters,
)
from transformers import AutoConfig

from rl_policy.generation.state import INITIAL_VERSION, TAGS, EngineState, EngineStateError
from rl_policy.generation.vllm.config import engine_arguments
from rl_policy.generation.vllm.engine.environment import (
    prepare_environment,
    require_vllm,
    temporary_files_apart,
)
from rl_policy.generation.vllm.engine.running import (
    EndedSubmission,
    Outputs,
    RequestLoop,
    Submission,
    Submissions,
    completions_of,
)
from rl_policy.generation.vllm.engine.turns import EngineThread, in_turn
from rl_policy.generation.vllm.engine.updates import EngineUpdates
from rl_policy.generation.vllm.requests import assemble_output, request_arguments, unsampled_ids
from rl_policy.generation.vllm.serving import ApiServer, EngineClient, ServerSettings

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import DeviceHandles, GenerationDatumSpec, GenerationOutputSpec, RefitInfo
    from rl_interfaces.backend.generation import SamplingConfig
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from rl_policy.generation.vllm.config import EngineConfig

_POLL_S = 0.01
"""Between two looks at whether clients' requests have ended."""


class VllmModelConfig(Protocol):
    """The members of vLLM's `ModelConfig` that are used here."""

    max_model_len: int

    def get_vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """Facts about an engine that has started."""

    process_id: int
    """The engine's process."""
    max_model_len: int
    """Most tokens per row, prompt and completion."""
    vocab_size: int
    """Size of the model's vocabulary."""


class VllmEngine:
    """A vLLM engine that samples, sleeps and is refitted.

    Args:
        config: How it runs.
        tokenizer: Decodes completions, in which stop strings are matched.
        engine_index: The index of this engine, from 0.
        weight_version: Of the weights that it loads by itself.

    Raises:
        ImportError: vLLM is not installed.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        engine_index: int = 0,
        weight_version: int = INITIAL_VERSION,
    ) -> None:
        require_vllm()
        prepare_environment(config.tensor_parallel_size, precision=config.precision)
        self._config = config
        self._index = engine_index
        self._state = EngineState(weight_version)
        self._server: ApiServer | None = None
        self._llm: Any = None
        # Named by every request of an engine with adapters.
        self._adapter: Any = None
        self._resources = ExitStack()
        self._thread = EngineThread()
        self._requests = RequestLoop(self._thread, step=self._step, abort=self._abort)
        self._submissions = Submissions()
        self._resources.callback(self._thread.close)
        try:
            self._start(config, tokenizer)
        except BaseException:
            self._resources.close()
            raise
        self._model: VllmModelConfig = self._llm.llm_engine.model_config
        self._unsampled = unsampled_ids(
            tokenizer, vocab_size=self._model.get_vocab_size(), engine_kwargs=config.engine_kwargs
        )
        self._updates = EngineUpdates(
            self._llm,
            config=config,
            thread=self._thread,
            requests=self._requests,
            state=self._state,
            first_receiver=engine_index * config.tensor_parallel_size,
        )

    @in_turn
    def _start(self, config: EngineConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        llm_class, self._make_parameters = _import_vllm()
        platform = import_module("vllm.platforms").current_platform
        self._can_sleep = config.is_colocated and platform.is_sleep_mode_available()
        directory = self._resources.enter_context(temporary_files_apart())
        model = AutoConfig.from_pretrained(
            config.model_name, trust_remote_code=config.trust_remote_code
        )
        arguments = engine_arguments(
            config,
            tokenizer=_save_tokenizer(tokenizer, model, directory),
            enable_sleep_mode=self._can_sleep,
            is_cpu=platform.is_cpu(),
            has_latent_attention=hasattr(model.get_text_config(), "kv_lora_rank"),
        )
        # The types of vLLM are installed with vLLM only.
        self._llm = llm_class(**arguments)
        if config.adapter_rank is not None:
            self._on_workers(start_adapters)
            # vLLM never reads the path, as the adapter is there already.
            request = import_module("vllm.lora.request").LoRARequest
            self._adapter = request("policy", ADAPTER_ID, "refit")
        # The label of the tokens that are sampled from now on.
        self._llm.llm_engine.set_weight_version(str(self._state.version))

    def describe(self) -> EngineFacts:
        """Return the engine's facts."""
        return EngineFacts(
            process_id=os.getpid(),
            max_model_len=self._model.max_model_len,
            vocab_size=self._model.get_vocab_size(),
        )

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        *,
        sampling: SamplingConfig,
        greedy: bool,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion per row, see `assemble_output`.

        A staged update may be committed meanwhile: later tokens are of its version.

        Args:
            data: See `GenerationDatumSpec`, and `sampling_seeds` (`[rows]` int64).
            sampling: How completions are sampled.
            greedy: Take the most likely token.

        Raises:
            EngineStateError: The engine sleeps, or its weights are not those of one version.
        """
        prompts = _prompts(data)
        arguments = self._request_arguments(data, prompts, sampling=sampling, greedy=greedy)
        running = self._enqueue(prompts, arguments)
        try:
            outputs = running.result()
        except BaseException:
            self._cancel(running)
            raise
        return assemble_output(
            prompts, completions_of(outputs), pad_token_id=_pad_token_id(sampling)
        )

    def submit(
        self,
        key: int,
        data: BatchedDataDict[GenerationDatumSpec],
        *,
        sampling: SamplingConfig,
        greedy: bool,
    ) -> None:
        """Start what `generate` does, and return at once; `next_ended` has what becomes of it.

        Between two steps, all that were submitted meanwhile join.

        Args:
            key: Names the submission.
            data: See `generate`.
            sampling: See `generate`.
            greedy: See `generate`.
        """
        prompts = _prompts(data)
        arguments = self._request_arguments(data, prompts, sampling=sampling, greedy=greedy)
        submission = Submission(key, prompts, pad_token_id=_pad_token_id(sampling))
        self._thread.post(partial(self._begin_submission, submission, arguments))

    @in_turn
    def cancel(self, keys: Sequence[int]) -> None:
        """Abort submissions, except those that have ended."""
        for key in keys:
            batch = self._submissions.batch(key)
            if batch is not None:
                self._requests.cancel(batch)

    def next_ended(self, timeout_s: float) -> list[EndedSubmission]:
        """Wait until a submission has ended; return all that have, each once.

        Args:
            timeout_s: Most seconds to wait; then the list is empty.
        """
        return self._submissions.next_ended(timeout_s)

    def sleep(self) -> None:
        """Free the device's memory, on devices on which vLLM can.

        A refit in flight is abandoned: the weights are undefined until the next full one. What
        clients of `serve` have asked for ends before, and what they ask for then waits.

        Raises:
            EngineStateError: Requests run.
        """
        deadline = time.monotonic() + self._config.generate_timeout_s
        with self._requests.holding():
            while self._requests.num_streams and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._sleep()

    @in_turn
    def _sleep(self) -> None:
        if not self._requests.is_idle:
            raise EngineStateError(
                "sleep is not allowed while requests run: collect or cancel them first"
            )
        self._updates.abandon()
        level = self._config.sleep_level
        if level == 2 and self._adapter is not None:
            self._on_workers(forget_base)
        asleep = self._state.asleep()
        self._state.sleep(level=level)
        if self._can_sleep and len(asleep) < len(TAGS):
            if "weights" in asleep:
                # vLLM takes an engine whose weights are asleep for one that is fully asleep.
                self._llm.wake_up(["weights"])
            self._give_memory_away(level)

    def _give_memory_away(self, level: int) -> None:
        try:
            self._llm.sleep(level=level)
        except Exception as error:
            # Its workers fail after they have given memory away, if another process has taken more
            # of the device meanwhile; vLLM takes the engine for one that is awake, and would load
            # and sample without that memory.
            self._on_workers("wake_up")
            self._llm.wake_up(["scheduling"])
            self._state.wake(TAGS)
            raise EngineStateError(f"vLLM does not sleep, and is awake again: {error}") from error

    @in_turn
    def wake(self, tags: Sequence[str] | None) -> bool:
        """Bring the memory of `tags` (None: all) back; True if all of it is on the device."""
        asleep = self._state.asleep(tags)
        if asleep and self._can_sleep:
            self._llm.wake_up(asleep)
        self._state.wake(asleep)  # after the call: it fails if the device has no room
        self._requests.wake_clients()
        return not self._state.asleep()

    def is_sampling(self) -> bool:
        """Return whether requests run."""
        return not self._requests.is_idle

    # Weights: a rank's calls are those of the object that it constructs.

    def init_transfer(self, addresses: Sequence[Mapping[str, object]], *, timeout_s: float) -> None:
        """See `EngineUpdates.init_transfer`."""
        self._updates.init_transfer(addresses, timeout_s=timeout_s)

    def find_room(self, *, only_host: bool) -> tuple[str | None, str]:
        """See `EngineUpdates.find_room`."""
        return self._updates.find_room(only_host=only_host)

    def holds_base(self) -> bool:
        """See `EngineUpdates.holds_base`."""
        return self._updates.holds_base()

    def begin_update(
        self, version: int, *, place: str | None = None, kv_cache: KvCache = "drop"
    ) -> None:
        """See `EngineUpdates.begin_update`."""
        self._updates.begin_update(version, place=place, kv_cache=kv_cache)

    def update(self, version: int) -> list[dict[str, float]]:
        """See `EngineUpdates.update`."""
        return self._updates.update(version)

    def commit_update(self, version: int) -> None:
        """See `EngineUpdates.commit_update`."""
        self._updates.commit_update(version)

    def update_metrics(self) -> dict[str, float]:
        """See `EngineUpdates.update_metrics`."""
        return self._updates.update_metrics()

    def init_collective(self, ip: str, port: int, world_size: int, *, timeout_s: float) -> None:
        """See `EngineUpdates.init_collective`."""
        self._updates.init_collective(ip, port, world_size, timeout_s=timeout_s)

    def update_from_collective(self, info: RefitInfo) -> None:
        """See `EngineUpdates.update_from_collective`."""
        self._updates.update_from_collective(info)

    def update_from_handles(self, handles: DeviceHandles, expected: Collection[str]) -> None:
        """See `EngineUpdates.update_from_handles`."""
        self._updates.update_from_handles(handles, expected)

    # Clients

    def serve(self, settings: ServerSettings) -> str:
        """Serve OpenAI's protocol; return the `base_url` for clients.

        Raises:
            ValueError: The engine serves already, or cannot with these settings.
        """
        if self._server is not None:
            raise ValueError(f"the engine serves already, on {self._server.address}")
        client = EngineClient(
            self._llm.llm_engine,
            thread=self._thread,
            requests=self._requests,
            state=self._state,
            adapter=self._adapter,
            timeout_s=self._config.generate_timeout_s,
        )
        port = settings.port + self._index if settings.port else 0
        self._server = ApiServer(client, settings, port=port)
        return self._server.address

    def is_serving(self) -> bool:
        """Return whether there is a server, and it has not ended by itself."""
        return self._server is not None and self._server.is_alive

    def stop_serving(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def shutdown(self) -> None:
        """End the server and vLLM's own processes. Idempotent."""
        self.stop_serving()
        if self._llm is not None:
            self._end()
            self._llm = None
            self._resources.close()

    def _on_workers(self, call: str | Callable[..., object], *args: object) -> list[Any]:
        return on_workers(self._llm, call, *args)

    @in_turn
    def _end(self) -> None:
        self._requests.fail(EngineStateError("the engine was shut down"))
        self._llm.llm_engine.engine_core.shutdown()

    def _request_arguments(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingConfig,
        greedy: bool,
    ) -> list[dict[str, object]]:
        return request_arguments(
            sampling,
            prompt_lengths=[len(prompt) for prompt in prompts],
            seeds=data["sampling_seeds"].tolist(),
            stop_strings=data.get("stop_strings") or [None] * len(prompts),
            max_length=self._model.max_model_len,
            unsampled=self._unsampled,
            greedy=greedy,
        )

    def _begin_submission(self, submission: Submission, arguments: list[dict[str, object]]) -> None:
        try:
            running = self._add_requests(submission.prompts, arguments)
        except Exception as error:  # for the caller, who does not wait for this turn
            running = Future[Outputs]()
            running.set_exception(error)
        self._submissions.add(submission, running)

    @in_turn
    def _enqueue(
        self, prompts: list[list[int]], arguments: list[dict[str, object]]
    ) -> Future[Outputs]:
        return self._add_requests(prompts, arguments)

    def _add_requests(
        self, prompts: list[list[int]], arguments: list[dict[str, object]]
    ) -> Future[Outputs]:
        """Add requests to those that run.

        Raises:
            EngineStateError: The engine sleeps, or its weights are not those of one version.
        """
        self._state.require_generate()
        # Prefixes that were computed with other weights must not be found.
        salt = str(self._state.version)
        names: Sequence[str] = []
        if prompts:
            names = self._llm.enqueue(
                [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts],
                [self._make_parameters(**row) for row in arguments],
                lora_request=self._adapter,
                use_tqdm=False,
            )
        return self._requests.add(names)

    @in_turn
    def _cancel(self, running: Future[Outputs]) -> None:
        self._requests.cancel(running)

    def _step(self) -> list[Any]:
        """Run one step of vLLM's scheduler; return its outputs."""
        # A swap that failed between two steps leaves nothing to sample from.
        self._state.require_generate()
        return self._llm.llm_engine.step()

    def _abort(self, running: Sequence[str]) -> None:
        self._llm.llm_engine.abort_request(list(running), internal=True)


def _import_vllm() -> tuple[Any, Any]:
    """Return `vllm.LLM` and `vllm.SamplingParams`."""
    # As in `WorkerHost.construct`: the collector would take a fifth of the seconds of the import.
    gc.disable()
    try:
        vllm = import_module("vllm")
        return vllm.LLM, vllm.SamplingParams
    finally:
        gc.freeze()
        gc.enable()


def _prompts(data: BatchedDataDict[GenerationDatumSpec]) -> list[list[int]]:
    """Return the tokens of each row, without padding."""
    return [
        row[:length].tolist()
        for row, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
    ]


def _pad_token_id(sampling: SamplingConfig) -> int:
    assert sampling.pad_token_id is not None, "parsing has resolved it"
    return sampling.pad_token_id


def _save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedConfig, directory: Path
) -> str:
    """Return a directory with the tokenizer and the model's config, which vLLM reads there too."""
    path = str(directory / "tokenizer")
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return path
