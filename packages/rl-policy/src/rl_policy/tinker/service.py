"""Sessions, models, samplers and futures: what tinker's clients know, and what they may do when.

All methods run in the server's event loop; what touches the policy becomes a job of the
`JobThread`, whose result the client retrieves as a future.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_policy.tinker.engine import SampleJob, TinkerEngine
from rl_policy.tinker.futures import Futures, InOrder, Job, JobThread
from rl_policy.tinker.requests import (
    CreateModel,
    CreateSampler,
    LoadWeights,
    OptimStep,
    RequestError,
    Sample,
    SaveForSampler,
    SaveWeights,
)
from rl_policy.tinker.store import SAMPLER_WEIGHTS, WEIGHTS, Checkpoint, CheckpointStore
from rl_policy.tinker.wire import (
    ForwardBackwardCall,
    read_call,
    write_forward_backward,
    write_samples,
)

logger = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """How much a server holds, and for how long; times are in seconds."""

    max_models: int
    max_samplers: int
    max_sequences: int
    """Sequences that are sampled together."""
    session_timeout_s: float
    gap_timeout_s: float
    result_kept_s: float


@dataclass(kw_only=True, slots=True)
class Model:
    """A training client's model."""

    session: str
    rank: int
    layers: list[str]
    order: InOrder


@dataclass(kw_only=True, slots=True)
class Sampler:
    """What a sampling client samples from."""

    session: str
    adapters: str | None
    """The set; None: the base model."""
    path: str | None = None
    """Of the checkpoint that it was made of."""
    clients: int = 1


class TinkerService:
    """The state of a server.

    Args:
        engine: Carries out the calls, in a thread.
        store: The checkpoints.
        base_model: The name under which clients know the model.
        tokenizer_id: The name or directory from which a client loads its tokenizer.
        limits: See `ServiceLimits`.
        is_fatal: Which errors end the server.
        on_fatal: Called with such an error, in the thread of the jobs.
    """

    def __init__(
        self,
        engine: TinkerEngine,
        store: CheckpointStore,
        *,
        base_model: str,
        tokenizer_id: str,
        limits: ServiceLimits,
        is_fatal: Callable[[Exception], bool],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self.base_model = base_model
        self.store = store
        self.futures = Futures(kept_s=limits.result_kept_s)
        self._engine = engine
        self._tokenizer_id = tokenizer_id
        self._limits = limits
        self._jobs = JobThread(max_size=limits.max_sequences, is_fatal=is_fatal, on_fatal=on_fatal)
        self._sessions: dict[str, float] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}
        # Of sets that samplers use, the one that was used least recently first.
        self._sampled_sets: list[str] = []

    @property
    def max_tokens(self) -> int:
        """Of a sequence, prompt and completion."""
        return self._engine.limits.max_tokens

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._jobs.close(timeout_s)

    # Sessions

    def create_session(self) -> str:
        """Return the id of a new session."""
        session = f"s{secrets.token_hex(8)}"
        self._sessions[session] = time.monotonic()
        return session

    def touch(self, session: str) -> None:
        """Note a sign of life.

        Raises:
            RequestError: There is no such session.
        """
        self.require_session(session)
        self._sessions[session] = time.monotonic()

    def require_session(self, session: str) -> None:
        """Raise `RequestError` if there is no such session."""
        if session not in self._sessions:
            raise RequestError(f"session_id={session!r} is unknown, or has ended")

    def end_session(self, session: str) -> None:
        """Drop the models and samplers of a session; checkpoints that were saved remain."""
        if self._sessions.pop(session, None) is None:
            return
        self.futures.drop(session)
        for name in [key for key, model in self._models.items() if model.session == session]:
            self._drop_model(name)
        for name in [key for key, each in self._samplers.items() if each.session == session]:
            sampler = self._samplers.pop(name)
            if sampler.adapters in self._sampled_sets:
                self._drop_sampled(sampler.adapters)

    def sweep(self) -> None:
        """End sessions whose clients are gone, and forget what has expired."""
        limit = time.monotonic() - self._limits.session_timeout_s
        for session in [key for key, seen in self._sessions.items() if seen < limit]:
            logger.warning(
                "session %s has shown no sign of life for %g s: it ends",
                session,
                self._limits.session_timeout_s,
            )
            self.end_session(session)
        self.futures.sweep()
        # In the thread that writes checkpoints: one that is being replaced may have expired.
        self._run(self.store.remove_expired)

    # Models

    def create_model(self, request: CreateModel) -> Json:
        """Start to create a model.

        Raises:
            RequestError: It cannot be created.
        """
        self.require_session(request.session_id)
        self._require_base_model(request.base_model)
        lora = request.lora_config
        if lora is None:
            raise RequestError("lora_config is missing: this server trains adapters alone")
        if request.optimizer_config.type != "adamw":
            raise RequestError(
                f"optimizer_config.type={request.optimizer_config.type!r}: only 'adamw' is there"
            )
        self._require_rank("lora_config.rank", lora.rank)
        name = f"{request.session_id}:train:{request.model_seq_id}"

        def create() -> Json:
            self._engine.create(name, rank=lora.rank, seed=lora.seed, layers=lora.layers)
            return {"type": "create_model", "model_id": name}

        return self._start_model(
            name, create, session=request.session_id, rank=lora.rank, layers=lora.layers
        )

    def _start_model(
        self,
        name: str,
        work: Callable[[], object],
        *,
        session: str,
        rank: int,
        layers: list[str],
    ) -> Json:
        """Start to add a model, once; it takes no room if that fails.

        Args:
            name: The model.
            work: Adds its set to the engine.
            session: Whose it is.
            rank: Of its adapters.
            layers: That it trains.

        Raises:
            RequestError: There are as many as the server holds.
        """
        request_id = f"{name}/create"
        if name in self._models or self.futures.get(request_id) is not None:
            return _promise(request_id, name)
        if len(self._models) >= self._limits.max_models:
            raise RequestError(
                f"there are {len(self._models)} models already, as many as tinker.max_models "
                "allows: end a session, or start the server with a larger number"
            )
        order = InOrder(first=1, gap_s=self._limits.gap_timeout_s)
        model = Model(session=session, rank=rank, layers=layers, order=order)
        self._models[name] = model

        def forget_if_failed(done: asyncio.Future[object]) -> None:
            if self._models.get(name) is not model:
                return
            if done.cancelled():
                self._drop_model(name)
            elif done.exception() is not None:
                del self._models[name]

        future = self.futures.add(request_id, owner=session)
        future.add_done_callback(forget_if_failed)
        self._run(work, future)
        return _promise(request_id, name)

    def model(self, name: str) -> Model:
        """Return a model.

        Raises:
            RequestError: There is none of that name.
        """
        found = self._models.get(name)
        if found is None:
            raise RequestError(f"model_id={name!r} is unknown, or its session has ended")
        return found

    def info(self, name: str) -> Json:
        """Return what a client is told of its model."""
        model = self.model(name)
        return {
            "type": "get_info",
            "model_id": name,
            "model_name": self.base_model,
            "is_lora": True,
            "lora_rank": model.rank,
            "optimizer_config": {"type": "adamw"},
            "model_data": {"model_name": self.base_model, "tokenizer_id": self._tokenizer_id},
        }

    def unload(self, name: str) -> Json:
        """Drop a model."""
        request_id = f"{name}/unload"
        if self.futures.get(request_id) is None:
            session = self.model(name).session
            self._drop_model(name)
            future = self.futures.add(request_id, owner=session)
            future.set_result({"type": "unload_model", "model_id": name})
        return _promise(request_id, name)

    def refuse(self, name: str, number: int) -> None:
        """Count a request of a model that cannot be read, as its client has."""
        order = self.model(name).order
        if not order.is_past(number):
            order.skip(number)

    # Training

    def forward_backward(self, model: str, number: int, message: Any) -> Json:
        """Start a `forward_backward` or `forward` call.

        Raises:
            RequestError: The call cannot be carried out; it counts as one that was.
        """

        def prepare() -> Callable[[], bytes]:
            call = read_call(message)
            return lambda: self._forward_backward(call)

        return self._start_in_order(model, number, prepare)

    def _forward_backward(self, call: ForwardBackwardCall) -> bytes:
        found = self._engine.forward_backward(call)
        return write_forward_backward(found.logprobs, {"loss:sum": found.loss})

    def optim_step(self, request: OptimStep) -> Json:
        """Start an optimizer step."""

        def step() -> Json:
            metrics = self._engine.step(request.model_id, request.adam_params)
            return {"metrics": metrics}

        return self._start_in_order(request.model_id, request.seq_id, lambda: step)

    # Checkpoints

    def save_weights(self, request: SaveWeights) -> Json:
        """Start to save adapters and optimizer state."""

        def prepare() -> Callable[[], Json]:
            checkpoint = self._checkpoint(request.model_id, WEIGHTS, request)
            return lambda: self._save(checkpoint, overwrite=request.overwrite, kind="save_weights")

        return self._start_in_order(request.model_id, request.seq_id, prepare)

    def save_for_sampler(self, request: SaveForSampler) -> Json:
        """Start to save adapters, or to take a snapshot of them to sample from."""
        model = self.model(request.model_id)
        if request.path is not None:

            def prepare() -> Callable[[], Json]:
                checkpoint = self._checkpoint(request.model_id, SAMPLER_WEIGHTS, request)
                return lambda: self._save(
                    checkpoint, overwrite=False, kind="save_weights_for_sampler"
                )

            return self._start_in_order(request.model_id, request.seq_id, prepare)

        def prepare_snapshot() -> Callable[[], Json]:
            number = request.sampling_session_seq_id
            if number is None:
                raise RequestError("path or sampling_session_seq_id is missing")
            sampler = f"{model.session}:sample:{number}"
            self._samplers[sampler] = Sampler(session=model.session, adapters=sampler)
            self._use_sampled(sampler)

            def snapshot() -> Json:
                self._engine.snapshot(request.model_id, sampler)
                return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

            return snapshot

        return self._start_in_order(request.model_id, request.seq_id, prepare_snapshot)

    def _save(self, checkpoint: Checkpoint, *, overwrite: bool, kind: str) -> Json:
        with_optimizer = checkpoint.kind == WEIGHTS

        def save(path: Path) -> None:
            self._engine.save(checkpoint.model, path, with_optimizer=with_optimizer)

        self.store.write(checkpoint, save, overwrite=overwrite)
        return {"type": kind, "path": checkpoint.path}

    def _checkpoint(
        self, name: str, kind: str, request: SaveWeights | SaveForSampler
    ) -> Checkpoint:
        model, now = self.model(name), time.time()
        assert request.path is not None, "its caller has a name"
        return Checkpoint(
            model=name,
            kind=kind,
            name=request.path,
            base_model=self.base_model,
            rank=model.rank,
            layers=model.layers,
            created=now,
            expires=None if request.ttl_seconds is None else now + request.ttl_seconds,
            metadata=request.user_metadata or {},
        )

    def load_weights(self, request: LoadWeights) -> Json:
        """Start to load a checkpoint into a model, which is created if a session is named."""
        if request.session_id is None:
            if request.model_id is None or request.seq_id is None:
                raise RequestError(
                    "model_id with seq_id, or session_id with model_seq_id is missing"
                )
            name = request.model_id
            model = self.model(name)

            def prepare() -> Callable[[], Json]:
                checkpoint, path = self._loadable(request)

                def replace() -> Json:
                    self._engine.replace(name, path, with_optimizer=request.optimizer)
                    model.rank, model.layers = checkpoint.rank, checkpoint.layers
                    return _loaded(request, name)

                return replace

            return self._start_in_order(name, request.seq_id, prepare)
        if request.model_seq_id is None:
            raise RequestError("model_seq_id is missing beside session_id")
        self.require_session(request.session_id)
        name = f"{request.session_id}:train:{request.model_seq_id}"
        checkpoint, path = self._loadable(request)

        def load() -> Json:
            self._engine.load(name, path, with_optimizer=request.optimizer)
            return _loaded(request, name)

        return self._start_model(
            name, load, session=request.session_id, rank=checkpoint.rank, layers=checkpoint.layers
        )

    def _loadable(self, request: LoadWeights) -> tuple[Checkpoint, Path]:
        if request.base_model is not None:
            self._require_base_model(request.base_model)
        checkpoint, path = self.store.find(request.path)
        if request.optimizer and checkpoint.kind != WEIGHTS:
            raise RequestError(f"{request.path} has no optimizer state")
        self._require_served(checkpoint)
        return checkpoint, path

    # Sampling

    def create_sampler(self, request: CreateSampler) -> str:
        """Return the id of a sampler of the base model, or of a checkpoint.

        Raises:
            RequestError: There is no such model or checkpoint.
        """
        self.require_session(request.session_id)
        if request.model_path is None and request.base_model is None:
            raise RequestError("base_model or model_path is missing")
        if request.base_model is not None:
            self._require_base_model(request.base_model)
        if request.model_path is not None:
            checkpoint, _ = self.store.find(request.model_path)
            self._require_served(checkpoint)
        sampler = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self._samplers.setdefault(
            sampler,
            Sampler(
                session=request.session_id,
                adapters=request.model_path and sampler,
                path=request.model_path,
            ),
        )
        return sampler

    def sampler(self, name: str) -> Sampler:
        """Return a sampler.

        Raises:
            RequestError: There is none of that name.
        """
        found = self._samplers.get(name)
        if found is None:
            raise RequestError(f"sampling_session_id={name!r} is unknown, or its session has ended")
        return found

    def describe_sampler(self, name: str) -> Json:
        """Return what a client is told of a sampler."""
        path = self.sampler(name).path
        return {"sampler_id": name, "base_model": self.base_model} | (
            {"model_path": path} if path else {}
        )

    def join_sampler(self, name: str) -> int:
        """Return the number of another client of a sampler; the first has 0."""
        sampler = self.sampler(name)
        sampler.clients += 1
        return sampler.clients - 1

    def sample(self, request: Sample) -> Json:
        """Start to sample; requests of the same settings are sampled together.

        Raises:
            RequestError: The request cannot be carried out.
        """
        name = request.sampling_session_id
        sampler = self.sampler(name)
        request_id = f"{name}/{request.seq_id}"
        ids = [f"{request_id}/{index}" for index in range(request.num_samples)]
        promise = {"request_id": request_id, "sample_sequence_ids": ids}
        if self.futures.get(request_id) is not None:
            return promise
        settings = request.sampling_params
        job = SampleJob(
            prompt=request.prompt.tokens,
            num_samples=request.num_samples,
            settings=settings,
            wants_prompt_logprobs=bool(request.prompt_logprobs),
            last_prompt_logprobs=request.prompt_logprobs_last_n,
        )
        job.check(self._engine.limits)
        if sampler.adapters is not None:
            self._load_sampled(sampler)
        future = self.futures.add(request_id, owner=sampler.session)
        # Those with a seed are alone: their tokens must not depend on what comes with them.
        group = None if settings.seed is not None else (name, settings.model_dump_json())
        self._jobs.submit(
            Job(
                run=lambda jobs: self._sample(sampler.adapters, jobs),
                argument=job,
                group=group,
                size=job.num_samples,
                future=future,
            )
        )
        return promise

    def _sample(self, adapters: str | None, jobs: Sequence[SampleJob]) -> list[bytes]:
        return [
            write_samples(found.sequences, prompt_logprobs=found.prompt_logprobs)
            for found in self._engine.sample(adapters, jobs)
        ]

    def _load_sampled(self, sampler: Sampler) -> None:
        """Have a sampler's adapters in memory, before the samples that are submitted next."""
        adapters, path = sampler.adapters, sampler.path
        assert adapters is not None, "it is not the base model"
        if adapters in self._sampled_sets:
            self._use_sampled(adapters)
            return
        if path is None:
            raise RequestError(
                f"the weights of {adapters} are no longer held: the server keeps the "
                f"{self._limits.max_samplers} samplers that were used last "
                "(tinker.max_samplers); save_weights_for_sampler with a name keeps them"
            )
        _, directory = self.store.find(path)
        self._use_sampled(adapters)

        def forget_if_failed(done: asyncio.Future[object]) -> None:
            if not done.cancelled() and done.exception() and adapters in self._sampled_sets:
                self._sampled_sets.remove(adapters)

        load = self._run(lambda: self._engine.load(adapters, directory, with_optimizer=False))
        # The next sample tries again.
        load.add_done_callback(forget_if_failed)

    def _use_sampled(self, adapters: str) -> None:
        """Note that a set was used last; drop the one that was used first if there are too many."""
        if adapters in self._sampled_sets:
            self._sampled_sets.remove(adapters)
        self._sampled_sets.append(adapters)
        while len(self._sampled_sets) > self._limits.max_samplers:
            self._drop_sampled(self._sampled_sets[0])

    # Jobs

    def _start_in_order(
        self, name: str, number: int, prepare: Callable[[], Callable[[], object]]
    ) -> Json:
        """Start a request of a model after those before it.

        Args:
            name: The model.
            number: Of the request.
            prepare: Returns what to do; raises `RequestError` if the request cannot be carried out.
        """
        model, request_id = self.model(name), f"{name}/{number}"
        if self.futures.get(request_id) is not None:
            return _promise(request_id, name)
        if model.order.is_past(number):
            raise RequestError(f"seq_id={number} of {name} was refused before, or is too old")
        try:
            work = prepare()
        except RequestError:
            # The client has counted it.
            model.order.skip(number)
            raise
        future = self.futures.add(request_id, owner=model.session)
        model.order.submit(number, lambda: self._run(work, future), future)
        return _promise(request_id, name)

    def _run(
        self, work: Callable[[], object], future: asyncio.Future[object] | None = None
    ) -> asyncio.Future[object]:
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(_log_failure)
        self._jobs.submit(Job(run=lambda _: [work()], argument=None, future=future))
        return future

    def _drop_model(self, name: str) -> None:
        del self._models[name]
        self._run(lambda: self._engine.remove(name))

    def _drop_sampled(self, adapters: str) -> None:
        self._sampled_sets.remove(adapters)
        self._run(lambda: self._engine.remove(adapters))

    def _require_rank(self, key: str, rank: int) -> None:
        if rank > self._engine.limits.max_rank:
            raise RequestError(
                f"{key}={rank} is above {self._engine.limits.max_rank}: start the server with a "
                "larger policy.dtensor_cfg.lora.r"
            )

    def _require_served(self, checkpoint: Checkpoint) -> None:
        """Raise `RequestError` if a checkpoint is of another model, or of too large a rank."""
        self._require_base_model(checkpoint.base_model)
        self._require_rank(f"{checkpoint.path}: rank", checkpoint.rank)

    def _require_base_model(self, name: str) -> None:
        if name != self.base_model:
            raise RequestError(f"base_model={name!r} is not served: only {self.base_model!r} is")


def _promise(request_id: str, model: str) -> Json:
    return {"request_id": request_id, "model_id": model}


def _loaded(request: LoadWeights, model: str) -> Json:
    return {"type": "load_weights", "path": request.path, "model_id": model}


def _log_failure(future: asyncio.Future[object]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("%s", error)
