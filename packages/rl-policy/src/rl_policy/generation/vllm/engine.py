"""One vLLM engine in this process, and the functions that run in vLLM's own workers.

An engine is a plain class: Ray is not known here, and vLLM is imported when an engine starts. Of
its two ways to new weights, `update` has a `RefitReceiver` in each of vLLM's workers (`rl_refit`'s
plug-in), while `update_from_collective` and `update_from_handles` load tensors by name, by the
functions at the end of this module.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from rl_refit.compat.broadcast import BroadcastGroup
from rl_refit.compat.handles import rebuild
from rl_refit.private_directory import PrivateDirectory
from rl_refit.vllm import (
    Worker,
    abandon,
    commit,
    finish_update,
    last_report,
    load,
    on_workers,
    start_update,
)
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import AutoConfig

from rl_policy.backends import BackendNotInstalledError
from rl_policy.generation.state import TAGS, EngineState
from rl_policy.generation.vllm.config import engine_arguments
from rl_policy.generation.vllm.requests import Completion, assemble_output, request_arguments

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import DeviceHandles, GenerationDatumSpec, GenerationOutputSpec, RefitInfo
    from rl_interfaces.backend.generation import SamplingConfig
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from rl_policy.generation.vllm.config import EngineConfig

ArgumentT = TypeVar("ArgumentT")

# torchrun's variables describe the worker group, while vLLM has process groups of its own.
_FOREIGN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ENVIRONMENT = {
    # The engine's core in this process: one process fewer, and a reproducible schedule.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engines and trainers share the cores; binding would put all of them on the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# In float32 vLLM attends by a Triton kernel, as FlashAttention takes half precision alone, and
# Triton multiplies float32 as TF32, with 10 bits of mantissa, unless it is told otherwise.
_OF_PRECISION = {"float32": {"TRITON_F32_DEFAULT": "ieee"}}
# Each load walks over all modules of the model, so that tensors are loaded in batches.
_BATCH_BYTES = 256 << 20


class VllmModelConfig(Protocol):
    """The members of vLLM's `ModelConfig` that are used here."""

    max_model_len: int

    def get_vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        ...


class VllmWorker(Worker, Protocol):
    """The members of vLLM's worker that are used here, and the group that is stored on it."""

    rank: int
    device: torch.device
    rl_policy_group: BroadcastGroup | None


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
    config: EngineConfig, tokenizer: PreTrainedTokenizerBase
) -> VllmEngine | BundleHolder:
    """Return the engine on the first rank of each tensor-parallel group, a holder on the others.

    vLLM starts the worker processes of a group itself, on the GPUs of the other ranks' bundles.

    Args:
        config: How the engine runs.
        tokenizer: See `VllmEngine`.
    """
    index, position = divmod(int(os.environ["RANK"]), config.tensor_parallel_size)
    return BundleHolder() if position else VllmEngine(config, tokenizer, engine_index=index)


def require_vllm() -> None:
    """Raise `ImportError`, with the remedy, unless vLLM is installed. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        raise BackendNotInstalledError(
            'The "vllm" generation backend is not installed. '
            'Install it with: pip install "rl-policy[vllm]"'
        )


def prepare_environment(tensor_parallel_size: int, *, precision: str) -> None:
    """Set this process's environment for an engine, before vLLM is imported.

    Args:
        tensor_parallel_size: How many of the visible GPUs the engine has, from `LOCAL_RANK` on.
        precision: See `VllmSection`.
    """
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if visible:
        first = int(os.environ.get("LOCAL_RANK", "0"))
        own = visible[first : first + tensor_parallel_size]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    for name in _FOREIGN_VARIABLES:
        os.environ.pop(name, None)
    for name, value in (_ENVIRONMENT | _OF_PRECISION.get(precision, {})).items():
        os.environ.setdefault(name, value)


class VllmEngine:
    """A vLLM engine that samples, sleeps and is refitted.

    Args:
        config: How it runs.
        tokenizer: Decodes completions, in which stop strings are matched.
        engine_index: The index of this engine, from 0.

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
        prepare_environment(config.tensor_parallel_size, precision=config.precision)
        self._config = config
        self._first_receiver = engine_index * config.tensor_parallel_size
        self._state = EngineState()
        self._loaded: set[str] = set()
        vllm, platform = import_module("vllm"), import_module("vllm.platforms").current_platform
        self._make_parameters = vllm.SamplingParams
        self._can_sleep = config.is_colocated and platform.is_sleep_mode_available()
        self._resources = ExitStack()
        try:
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
            self._llm: Any = vllm.LLM(**arguments)
        except BaseException:
            self._resources.close()
            raise
        self._model: VllmModelConfig = self._llm.llm_engine.model_config

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

        Args:
            data: See `GenerationDatumSpec`, and `sampling_seeds` (`[rows]` int64).
            sampling: How completions are sampled.
            greedy: Take the most likely token.

        Raises:
            EngineStateError: The engine sleeps, or its weights are not those of one version.
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
            max_length=self._model.max_model_len,
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
        """Free the device's memory, on devices on which vLLM can.

        A refit in flight is abandoned: the weights are undefined until the next full one.
        """
        if not self._state.is_committed:
            self._on_workers(abandon)
        level = self._config.sleep_level
        asleep = self._state.asleep()
        self._state.sleep(level=level)
        if self._can_sleep and len(asleep) < len(TAGS):
            if "weights" in asleep:
                # vLLM takes an engine whose weights are asleep for one that is fully asleep.
                self._llm.wake_up(["weights"])
            self._llm.sleep(level=level)

    def wake(self, tags: Sequence[str] | None) -> bool:
        """Bring the memory of `tags` (None: all) back; True if all of it is on the device."""
        asleep = self._state.asleep(tags)
        if asleep and self._can_sleep:
            self._llm.wake_up(asleep)
        self._state.wake(asleep)  # after the call: it fails if the device has no room
        return not self._state.asleep()

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

    def begin_update(self, version: int) -> None:
        """Open a refit to `version`; nothing is sampled until it is committed."""
        self._state.begin_update(version)
        self._loaded.clear()
        with self._losing_weights_on_error(version):
            self._on_workers(start_update)

    def update(self, version: int) -> list[dict[str, float]]:
        """Receive and load every tensor, while the sender sends; return a report per receiver."""
        self._state.require_update("update", version)
        with self._losing_weights_on_error(version):
            self._on_workers("update_weights", {"version": version})
            finish_update(self._llm, version)
            reports = self._on_workers(last_report)
        self._state.receive()
        return reports

    def init_collective(self, ip: str, port: int, world_size: int, *, timeout_s: float) -> None:
        """Join the group of the trainer, whose rank 0 listens at the address."""
        first_rank = 1 + self._first_receiver
        self._on_workers(join_group, ip, port, world_size, first_rank, timeout_s)

    def update_from_collective(self, info: RefitInfo) -> None:
        """Receive and load every tensor of `info`, while the trainer broadcasts."""
        self._load_by_name(load_from_group, info, names=info, expected=info)

    def update_from_handles(self, handles: DeviceHandles, expected: Collection[str]) -> None:
        """Load one group of tensors; the update is complete once all of `expected` are loaded."""
        names = {name for group in handles.values() for name in group}
        self._load_by_name(load_from_handles, handles, names=names, expected=expected)

    def commit_update(self, version: int) -> None:
        """Sample from the loaded weights from now on. Idempotent.

        Whatever can fail in a refit is part of the update: if one of several engines fails, none is
        committed, and the same version can be sent again.
        """
        if self._state.has_committed(version):
            return
        self._state.require_commit(version)
        with self._losing_weights_on_error(version):
            # Tensors that were loaded by name have passed no receiver, which could commit them.
            if not self._loaded:
                self._on_workers(commit, version)
        self._state.commit()

    def shutdown(self) -> None:
        """End vLLM's own processes. Idempotent."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
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

    def _complete(
        self, prompts: list[list[int]], arguments: list[dict[str, object]]
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
        except BaseException as error:  # an interrupted load has overwritten some weights as well
            self._state.lose(f"the refit to version {version} failed ({error})")
            raise


@contextmanager
def temporary_files_apart() -> Iterator[Path]:
    """Put this process's temporary files, and those of its children, into a directory of their own.

    vLLM's processes meet by files there, which they leave behind if they are killed: the next
    engine that starts then removes the directory. What is compiled stays where that engine looks
    for it.

    Yields:
        The directory.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    with PrivateDirectory("rl-policy-vllm-") as directory:
        # Python reads the variable once, and keeps what it has found in `tempdir`.
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory.path)
        try:
            yield directory.path
        finally:
            variable, tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


def _save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedConfig, directory: Path
) -> str:
    """Return a directory with the tokenizer and the model's config, which vLLM reads there too."""
    path = str(directory / "tokenizer")
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return path


# Functions that run in vLLM's workers: each is sent to all of them, and takes the worker first.


def join_group(
    worker: VllmWorker, ip: str, port: int, world_size: int, first_rank: int, timeout_s: float
) -> None:
    """Join the trainer and the other receivers in a group, instead of an earlier one.

    Args:
        worker: vLLM's.
        ip: Address of the trainer's rank 0.
        port: The port there.
        world_size: The receivers and the trainer.
        first_rank: The rank in the group of this engine's first worker.
        timeout_s: Limit of the rendezvous and of each broadcast, in seconds.
    """
    group: BroadcastGroup | None = getattr(worker, "rl_policy_group", None)
    if group is not None:
        group.close()
        worker.rl_policy_group = None
    worker.rl_policy_group = BroadcastGroup(
        ip,
        port,
        rank=first_rank + worker.rank,
        world_size=world_size,
        device=worker.device,
        timeout_s=timeout_s,
    )


def load_from_group(worker: VllmWorker, info: RefitInfo) -> None:
    """Load the tensors that the trainer broadcasts.

    Args:
        worker: vLLM's.
        info: `{name: (shape, wire dtype)}` of all tensors, in order.
    """
    group: BroadcastGroup | None = getattr(worker, "rl_policy_group", None)
    if group is None:
        raise RuntimeError("init_collective was not called: nobody sends weights")
    _load_in_batches(worker, group.receive(info))


def load_from_handles(worker: VllmWorker, handles: DeviceHandles) -> None:
    """Load the tensors of some handles.

    Args:
        worker: vLLM's.
        handles: `{device id: {name: handle}}`. A worker opens those of its own GPU, on the CPU
            those of any device.
    """
    if worker.device.type == "cuda":
        own = f"GPU-{torch.cuda.get_device_properties(worker.device).uuid}"
        if own not in handles:
            raise RuntimeError(f"there are no handles of {own}, but of {sorted(handles)}")
        chosen = handles[own]
    else:
        chosen = next(iter(handles.values()))
    tensors = ((name, rebuild(handle, worker.device)) for name, handle in chosen.items())
    _load_in_batches(worker, tensors)


def _load_in_batches(worker: VllmWorker, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    batch: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= _BATCH_BYTES:
            load(worker, batch)
            batch, num_bytes = [], 0
    if batch:
        load(worker, batch)
