"""One vLLM engine in this process, and the functions that run in vLLM's own workers.

An engine is a plain class: Ray is not known here, and vLLM is imported when an engine starts. Of
its two ways to new weights, `update` has a `RefitReceiver` in each of vLLM's workers (`rl_refit`'s
plug-in), while `update_from_collective` and `update_from_handles` load tensors by name, by the
functions at the end of this module.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rl_refit.vllm import (
    ADAPTER_ID,
    KvCache,
    abandon,
    abandon_staging,
    commit,
    find_room,
    finish_update,
    flip,
    forget_base,
    holds_base,
    is_staged,
    last_report,
    on_workers,
    release_staging,
    stage,
    start_adapters,
    start_update,
)
from transformers import AutoConfig

from rl_policy.backends import BackendNotInstalledError
from rl_policy.generation.state import INITIAL_VERSION, TAGS, EngineState, EngineStateError
from rl_policy.generation.vllm.config import engine_arguments
from rl_policy.generation.vllm.environment import prepare_environment, temporary_files_apart
from rl_policy.generation.vllm.requests import assemble_output, request_arguments
from rl_policy.generation.vllm.running import (
    EndedSubmission,
    Outputs,
    RequestLoop,
    Submission,
    Submissions,
    completions_of,
)
from rl_policy.generation.vllm.serving import ApiServer, EngineClient, ServerSettings
from rl_policy.generation.vllm.turns import EngineThread, in_turn
from rl_policy.generation.vllm.worker_calls import (
    VllmWorker,
    join_group,
    load_from_group,
    load_from_handles,
)

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import DeviceHandles, GenerationDatumSpec, GenerationOutputSpec, RefitInfo
    from rl_interfaces.backend.generation import SamplingConfig
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from rl_policy.generation.vllm.config import EngineConfig

ArgumentT = TypeVar("ArgumentT")

_POLL_S = 0.01
"""Between two looks at a staged update, each of which takes a turn between two steps."""


@dataclass(kw_only=True, slots=True)
class UpdateTimes:
    """How an update goes."""

    staged: bool = False
    """Whether the engine samples while it receives."""
    begun_at: float = field(default_factory=time.perf_counter)
    """When the engine stopped to sample."""
    pause_s: float = 0.0
    """Seconds until it sampled again."""


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


class BundleHolder:
    """Holds a device for the engine of another rank: every call returns None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Python looks up private names of its own, e.g. to pickle, and must not find them.
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def shutdown(self) -> None:
        """Do nothing."""


def start_on_rank(
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    weight_version: int = INITIAL_VERSION,
) -> VllmEngine | BundleHolder:
    """Return the engine on the first rank of each tensor-parallel group, a holder on the others.

    vLLM starts the worker processes of a group itself, on the GPUs of the other ranks' bundles.

    Args:
        config: How the engine runs.
        tokenizer: See `VllmEngine`.
        weight_version: See `VllmEngine`.
    """
    index, position = divmod(int(os.environ["RANK"]), config.tensor_parallel_size)
    if position:
        return BundleHolder()
    return VllmEngine(config, tokenizer, engine_index=index, weight_version=weight_version)


def require_vllm() -> None:
    """Raise `ImportError`, with the remedy, unless vLLM is installed. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        raise BackendNotInstalledError(
            'The "vllm" generation backend is not installed. '
            'Install it with: pip install "rl-policy[vllm]"'
        )


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
        self._first_receiver = engine_index * config.tensor_parallel_size
        self._state = EngineState(weight_version)
        self._server: ApiServer | None = None
        self._loaded: set[str] = set()
        self._update = UpdateTimes()
        self._kv_cache: KvCache = "drop"
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

    @in_turn
    def _start(self, config: EngineConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        vllm, platform = import_module("vllm"), import_module("vllm.platforms").current_platform
        self._make_parameters = vllm.SamplingParams
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
        self._llm = vllm.LLM(**arguments)
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
        with self._holding_clients():
            while self._requests.num_streams and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._sleep()

    @in_turn
    def _sleep(self) -> None:
        if not self._requests.is_idle:
            raise EngineStateError(
                "sleep is not allowed while requests run: collect or cancel them first"
            )
        if not self._state.is_committed:
            self._on_workers(abandon)
        if self._update.staged:
            # A sleeping engine gives its memory away.
            self._on_workers(release_staging)
        level = self._config.sleep_level
        if level == 2 and self._adapter is not None:
            self._on_workers(forget_base)
        asleep = self._state.asleep()
        self._state.sleep(level=level)
        if self._can_sleep and len(asleep) < len(TAGS):
            if "weights" in asleep:
                # vLLM takes an engine whose weights are asleep for one that is fully asleep.
                self._llm.wake_up(["weights"])
            self._llm.sleep(level=level)

    @in_turn
    def wake(self, tags: Sequence[str] | None) -> bool:
        """Bring the memory of `tags` (None: all) back; True if all of it is on the device."""
        asleep = self._state.asleep(tags)
        if asleep and self._can_sleep:
            self._llm.wake_up(asleep)
        self._state.wake(asleep)  # after the call: it fails if the device has no room
        self._requests.wake_clients()
        return not self._state.asleep()

    @in_turn
    def init_transfer(self, addresses: Sequence[Mapping[str, object]], *, timeout_s: float) -> None:
        """Set the senders of the engine's receivers.

        Args:
            addresses: The sender's address for each receiver of every engine.
            timeout_s: Limit of each wait of a refit, in seconds.
        """
        last = self._first_receiver + self._config.tensor_parallel_size
        info = {
            "address": [dict(address) for address in addresses[self._first_receiver : last]],
            "rank_offset": self._first_receiver,
            "timeout_s": timeout_s,
        }
        self._on_workers("init_weight_transfer_engine", info)

    @in_turn
    def find_room(self, *, only_host: bool) -> tuple[str | None, str]:
        """Return where a second set of weights can be held, or None and why nowhere."""
        return find_room(self._llm, only_host=only_host)

    @in_turn
    def holds_base(self) -> bool:
        """Return whether every worker holds its sender's weights without adapters."""
        return all(self._on_workers(holds_base))

    def begin_update(
        self, version: int, *, place: str | None = None, kv_cache: KvCache = "drop"
    ) -> None:
        """Open a refit to `version`.

        Args:
            version: Of the new weights.
            place: Of `find_room`: where they are received, beside those that are sampled from. They
                are exchanged at the commit. None: nothing is sampled until the commit.
            kv_cache: What becomes of running requests at a staged commit, see `rl_refit.vllm.flip`.

        Raises:
            ValueError: `version` is not newer than the committed one.
            EngineStateError: The weights are asleep, or requests do not end.
        """
        if place is not None:
            self._begin_staged(version, place, kv_cache)
            return
        # Requests that run would be sampled from a mixture of weights.
        deadline = time.monotonic() + self._config.generate_timeout_s
        with self._holding_clients():
            while not self._begin_if_idle(version):
                if not self._requests.wait_idle(deadline - time.monotonic()):
                    raise EngineStateError(
                        f"begin_update({version}): requests have not ended in time"
                    )

    @in_turn
    def _begin_staged(self, version: int, place: str, kv_cache: KvCache) -> None:
        self._require_labels(kv_cache)
        self._state.begin_update(version, staged=True)
        self._kv_cache, self._update = kv_cache, UpdateTimes(staged=True)
        self._loaded.clear()
        with self._losing_weights_on_error(version):
            # Of a driver that begins anew instead of committing.
            self._on_workers(abandon_staging)
            stage(self._llm, version, place=place)

    @in_turn
    def _begin_if_idle(self, version: int) -> bool:
        if not self._requests.is_idle:
            return False
        self._begin(version)
        return True

    def _begin(self, version: int) -> None:
        self._state.begin_update(version)
        self._update = UpdateTimes(staged=False)
        self._loaded.clear()
        with self._losing_weights_on_error(version):
            self._on_workers(start_update)

    def _require_labels(self, kv_cache: KvCache) -> None:
        scheduler = self._llm.llm_engine.vllm_config.scheduler_config
        if kv_cache == "keep" and scheduler.async_scheduling:
            raise ValueError(
                'kv_cache="keep" needs generation.vllm_cfg.engine_kwargs.async_scheduling=False: '
                "otherwise vLLM labels the tokens of one step with the version of the next"
            )

    def update(self, version: int) -> list[dict[str, float]]:
        """Receive every tensor, while the sender sends; return a report per receiver.

        Unless the update is staged, the weights are overwritten meanwhile.
        """
        if not self._update.staged:
            return self._update_in_place(version)
        # Each receiver ends at its own time limit, and so does this.
        while (reports := self._poll_staged(version)) is None:
            time.sleep(_POLL_S)
        return reports

    @in_turn
    def _poll_staged(self, version: int) -> list[dict[str, float]] | None:
        self._state.require_update("update", version)
        with self._losing_weights_on_error(version):
            if not is_staged(self._llm):
                return None
            reports = self._on_workers(last_report)
        self._state.receive()
        return reports

    @in_turn
    def _update_in_place(self, version: int) -> list[dict[str, float]]:
        self._state.require_update("update", version)
        with self._losing_weights_on_error(version):
            self._on_workers("update_weights", {"version": version})
            finish_update(self._llm, version)
            reports = self._on_workers(last_report)
        self._state.receive()
        return reports

    @in_turn
    def init_collective(self, ip: str, port: int, world_size: int, *, timeout_s: float) -> None:
        """Join the group of the trainer, whose rank 0 listens at the address."""
        first_rank = 1 + self._first_receiver
        self._on_workers(join_group, ip, port, world_size, first_rank, timeout_s)

    @in_turn
    def update_from_collective(self, info: RefitInfo) -> None:
        """Receive and load every tensor of `info`, while the trainer broadcasts."""
        self._load_by_name(load_from_group, info, names=info, expected=info)

    @in_turn
    def update_from_handles(self, handles: DeviceHandles, expected: Collection[str]) -> None:
        """Load one group of tensors; the update is complete once all of `expected` are loaded."""
        names = {name for group in handles.values() for name in group}
        self._load_by_name(load_from_handles, handles, names=names, expected=expected)

    def is_sampling(self) -> bool:
        """Return whether requests run."""
        return not self._requests.is_idle

    def update_metrics(self) -> dict[str, float]:
        """Return how the last update went.

        Returns:
            `refit_pause_s`, seconds in which the engine could not sample, and `refit_staged`, 1.0
            if it was staged.
        """
        return {
            "refit_pause_s": self._update.pause_s,
            "refit_staged": float(self._update.staged),
        }

    @in_turn
    def commit_update(self, version: int) -> None:
        """Sample from the loaded weights from now on. Idempotent.

        Whatever can fail in a refit is part of the update: if one of several engines fails, none is
        committed, and the same version can be sent again.
        """
        if self._state.has_committed(version):
            return
        self._state.require_commit(version)
        if self._update.staged:
            self._update.begun_at = time.perf_counter()
            self._state.start_swap()
        with self._losing_weights_on_error(version):
            if self._update.staged:
                flip(self._llm, version, kv_cache=self._kv_cache)
            # Tensors that were loaded by name have passed no receiver, which could commit them.
            elif not self._loaded:
                self._on_workers(commit, version)
        self._state.commit()
        self._requests.wake_clients()
        self._update.pause_s = time.perf_counter() - self._update.begun_at

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

    def _load_by_name(
        self,
        load_tensors: Callable[[VllmWorker, ArgumentT], None],
        argument: ArgumentT,
        *,
        names: Collection[str],
        expected: Collection[str],
    ) -> None:
        version = self._state.incoming
        self._state.require_update("update_weights", version)
        with self._losing_weights_on_error(version):
            self._on_workers(load_tensors, argument)
            self._loaded.update(names)
            if self._loaded.issuperset(expected):
                finish_update(self._llm, version)
                self._state.receive()

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

    @contextmanager
    def _holding_clients(self) -> Iterator[None]:
        self._requests.hold()
        try:
            yield
        finally:
            self._requests.release()

    @contextmanager
    def _losing_weights_on_error(self, version: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # an interrupted load has overwritten some weights as well
            self._state.lose(f"the refit to version {version} failed ({error})")
            raise


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
