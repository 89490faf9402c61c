"""The driver's side of vLLM: one engine per tensor-parallel group of a cluster's bundles."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rl_batched_data import BatchedDataDict
from rl_batched_data.sharding import ShardPlan
from rl_interfaces import NOT_SAMPLED, ROUTER_CHOOSES, GenerationInterface

from rl_policy import dispatch
from rl_policy.generation.state import INITIAL_VERSION
from rl_policy.generation.vllm.config import (
    check_sampling,
    count_engines,
    parse_engine_config,
    parse_sampling_config,
)
from rl_policy.generation.vllm.engine.environment import require_vllm
from rl_policy.generation.vllm.engine.start import start_on_rank
from rl_policy.generation.vllm.membership import Membership
from rl_policy.generation.vllm.quantized import block_fp8_tensors
from rl_policy.generation.vllm.requests import check_prompts, row_seeds
from rl_policy.generation.vllm.stream import LANES, EngineStream
from rl_policy.generation.vllm.transaction import Staging, UpdateTransaction
from rl_policy.ray.cluster import bundle_nodes, bundles_per_node, rank_bundles
from rl_policy.ray.failures import WorkerDiedError
from rl_policy.ray.sharding import NamedSharding
from rl_policy.ray.worker_group import RankCall, RayWorkerGroup

if TYPE_CHECKING:
    import ray
    from rl_interfaces import (
        Cluster,
        DeviceHandles,
        FinishedSubmission,
        GenerationConfig,
        GenerationDatumSpec,
        GenerationOutputSpec,
        RefitInfo,
    )
    from rl_refit.vllm import KvCache
    from transformers import PreTrainedTokenizerBase

    from rl_policy.generation.vllm.engine.vllm_engine import EngineFacts
    from rl_policy.generation.vllm.serving import ServerSettings

logger = logging.getLogger(__name__)

_PAD_VALUES = {"weight_versions": NOT_SAMPLED, "routed_experts": ROUTER_CHOOSES}
_ROW_KEYS = ("input_ids", "input_lengths", "stop_strings")


class VllmGeneration(GenerationInterface):
    """vLLM engines on the bundles of a cluster, with the calls of an RL algorithm.

    Each engine has `vllm_cfg.tensor_parallel_size` bundles of one node, and the rows of a batch are
    sharded over the engines. To share a cluster with a policy, create it with
    `max_colocated_worker_groups=2`. An invalid configuration is refused before an engine starts.
    Samples are reproducible: the random numbers of a row depend on `seed`, the weights' version,
    how many calls of `generate` and `submit` have sampled from that version, and the row in its
    call, but not on the number of engines.

    One of several engines that do not share their devices with a policy is started anew when it
    dies. The others sample again what it was sampling, and go on; it takes part in the next update,
    or in one of its own (`begin_catch_up`), and samples from its commit on. If all have died, or
    they serve clients, calls raise `WorkerDiedError`.

    `submit`, `collect` and `cancel` sample without waiting, see `GenerationStream`: submissions and
    calls of `generate` share an engine's steps, and staged refits go on beside them.

    Example:
        engines = VllmGeneration(cluster, {"backend": "vllm", "model_name": "my-model",
                                           "vllm_cfg": {"precision": "float32"}, ...}, tokenizer)
        engines.generate(prompts)["weight_version"]  -> tensor([-1, -1])

    Args:
        cluster: Where the engines run; they do not shut it down.
        config: A `GenerationConfig`, see `VllmSection` for its `vllm_cfg`.
        tokenizer: The model's tokenizer. None: that of `model_name`.
        name_prefix: Prefix of the engines' names in errors and in their output.
        workers_per_node: How many bundles of each node to use. None: all.
        seed: Seed of the samples.
        timeout_s: Limit of the start and of each call but `generate`, in seconds. Of a start anew
            too: one that takes longer is repeated.
        weight_version: Of the weights in `model_name`.

    Raises:
        ValueError: An argument or a config value is not possible; names key and numbers.
        ImportError: vLLM is not installed.
    """

    contract_version = (1, 0)

    def __init__(
        self,
        cluster: Cluster,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name_prefix: str = "vllm",
        workers_per_node: int | list[int] | None = None,
        *,
        seed: int = 0,
        timeout_s: float = 600.0,
        weight_version: int = INITIAL_VERSION,
    ) -> None:
        # First, as `__del__` reads it even if the constructor fails.
        self._group: RayWorkerGroup | None = None
        engine = parse_engine_config(config, seed=seed)
        require_vllm()
        if tokenizer is None:
            # Here, as it imports the code of models, which takes a second.
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                engine.model_name, trust_remote_code=engine.trust_remote_code
            )
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._sampling = parse_sampling_config(
            config,
            tokenizer,  # pyright: ignore[reportArgumentType] # its ids are set at run time
            batch_size=engine.max_num_seqs,
        )
        self._model = (engine.model_name, engine.trust_remote_code)
        self._timeout_s = timeout_s
        self._generate_timeout_s = engine.generate_timeout_s
        self._seed = seed
        # A copy for seeds and callers: each engine owns its own, and `commit_update` sets them all.
        self._version = weight_version
        self._calls_since_version = 0
        # Another thread may submit while this one commits a version.
        self._counting = threading.Lock()
        self._refit_info: RefitInfo = {}
        per_node = bundles_per_node(cluster, workers_per_node)
        sharding = _engine_grid(cluster, per_node, engine.tensor_parallel_size)
        is_elastic = not engine.is_colocated and sharding.get_axis_size("data_parallel") > 1
        self._group = RayWorkerGroup(
            cluster,
            start_on_rank,
            (engine, tokenizer, weight_version),
            sharding=sharding,
            name=name_prefix,
            workers_per_node=per_node,
            start_timeout_s=timeout_s,
            takes_calls_beside=True,
            lanes=LANES,
            ranks_stand_alone=is_elastic,
        )
        tensor_parallel_size = engine.tensor_parallel_size
        per_engine = engine.max_requests_in_flight or 2 * engine.max_num_seqs
        self._stream = EngineStream(
            self._group,
            engine_ranks=range(0, sharding.size, tensor_parallel_size),
            limit=per_engine * self.num_engines,
            timeout_s=timeout_s,
        )
        self._members = Membership(
            self._group, self._stream, ranks_per_engine=tensor_parallel_size, timeout_s=timeout_s
        )
        self._updates = UpdateTransaction(
            self._group,
            self._members,
            self._stream,
            has_adapters=engine.adapter_rank is not None,
            timeout_s=timeout_s,
            generate_timeout_s=engine.generate_timeout_s,
        )

    @staticmethod
    def validate_config(config: Mapping[str, Any]) -> None:
        """Raise the constructor's errors for `config`, before anything starts.

        Raises:
            ValueError: A key is unknown, or a value out of range; names key and value.
            ImportError: vLLM is not installed.
        """
        parse_engine_config(config, seed=0, path="policy.generation")
        check_sampling(config, path="policy.generation")
        require_vllm()

    @property
    def weight_version(self) -> int:
        """The committed version of the weights; before the first refit, that of the model."""
        return self._version

    def quantized_tensors(self) -> list[str]:
        """Return which of the model's tensors engines hold in 8 bits, and have to be sent so.

        Raises:
            ValueError: The model is quantised in a format that no weights can be sent in.
        """
        name, trust_remote_code = self._model
        return block_fp8_tensors(name, trust_remote_code=trust_remote_code)

    @property
    def num_engines(self) -> int:
        """The number of engines."""
        return self._engines.sharding.get_axis_size("data_parallel")

    @property
    def num_receivers(self) -> int:
        """The number of processes that receive weights: all ranks of all engines."""
        return self._engines.sharding.size

    @property
    def has_lost_engine(self) -> bool:
        """Whether engines have died so that a refit and `generate` cannot go on."""
        if self._engines.ranks_stand_alone:
            return self._engines.has_ended
        return self._engines.has_ended or self._stream.has_lost_engine

    @property
    def membership(self) -> Membership:
        """Who of the engines lives and takes part in updates, see `refit.ElasticEngines`."""
        return self._members

    @property
    def facts(self) -> list[EngineFacts]:
        """Facts about each engine."""
        return self._members.facts

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion per row, in the caller's order, see `GenerationOutputSpec`.

        Args:
            data: The prompts, see `GenerationDatumSpec`; any number of rows.
            greedy: Take the most likely token every time, whatever the configuration says.

        Returns:
            A `GenerationOutputSpec`, and `weight_versions` `[batch, seq]` int64: the committed
            version that each token was sampled from, -1 before the first refit, and -2 where none
            was sampled (prompt, padding). `weight_version` `[batch]` int64 is the oldest of each
            row. They differ only if a staged update is committed meanwhile, from another thread.

        Raises:
            ValueError: A prompt leaves no room for a token, or has one outside the vocabulary.
            EngineStateError: An engine sleeps, or a refit is in flight or has failed.
        """
        with self._counting:
            batch = self._seeded(data)
            call = self._submit_generate(batch, greedy=greedy)
            self._count_call(greedy=greedy)
        while True:
            try:
                parts = self._engines.wait(call, timeout_s=self._generate_timeout_s)
                break
            except WorkerDiedError as death:
                if not self._members.is_usable:
                    raise
                logger.warning("%s: its rows are sampled again", death.summary)
                call = self._submit_generate(batch, greedy=greedy)
        assert self._sampling.pad_token_id is not None, "parsing has resolved it"
        return dispatch.gather_generations(
            parts, pad_token_id=self._sampling.pad_token_id, pad_values=_PAD_VALUES
        )

    # Without waiting

    @property
    def room(self) -> int:
        """Rows that may be submitted now, see `vllm_cfg.max_requests_in_flight`."""
        return self._stream.room

    def submit(self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False) -> int:
        """Start to sample a completion per row on one engine; return the submission's ticket.

        It joins what the engine samples already. Nothing is waited for: what an engine refuses,
        `collect` raises.

        Args:
            data: The prompts, see `GenerationDatumSpec`.
            greedy: See `generate`.

        Raises:
            ValueError: A prompt leaves no room for a token, or has one outside the vocabulary; or
                there are more rows than the limit.
            StreamFullError: There are more rows than `room`.
        """
        self._members.advance()
        with self._counting:
            batch = self._seeded(data)
            ticket = self._stream.submit(batch, sampling=self._sampling, greedy=greedy)
            self._count_call(greedy=greedy)
        return ticket

    def collect(
        self, tickets: Iterable[int] | None = None, *, timeout_s: float
    ) -> list[FinishedSubmission]:
        """Wait until a submission has finished; return all that have, see `GenerationStream`.

        Their `output` is what `generate` returns.

        Raises:
            ValueError: A ticket is unknown.
            TicketsLostError: Submissions have failed, as the engine sleeps or is being refitted
                without staging, or a refit has lost its weights.
            EngineLostError: Every engine has died, or one of those that are not replaced. What
                others sample can still be collected.
            Exception: Several starts anew of an engine have failed; what the last one raised. The
                next call returns what has finished.
        """
        finished = self._stream.collect(tickets, timeout_s=timeout_s)
        try:
            self._members.advance()
        except BaseException:
            self._stream.put_back(finished)
            raise
        return finished

    def cancel(self, tickets: Iterable[int]) -> None:
        """Abort submissions and free what they take, see `GenerationStream`."""
        self._stream.cancel(tickets)

    def prepare_for_generation(
        self, tags: Sequence[str] | None = None, *args: object, **kwargs: object
    ) -> bool:
        """Wake the engines; True if all of their memory is on the device.

        Args:
            tags: `weights`, `kv_cache` or, with None, both. A refit needs `weights` only, and can
                use the memory of the other for its buffers.
            args: Ignored.
            kwargs: Ignored.
        """
        return all(self._members.on_all("wake", tags))

    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        """Put the engines to sleep, see `vllm_cfg.sleep_level`; return True.

        Raises:
            EngineStateError: Submissions run.
        """
        self._stream.settle()
        self._members.on_all("sleep")
        return True

    # Clients

    def serve(self, settings: ServerSettings) -> list[str]:
        """Serve OpenAI's protocol on every engine; return the `base_url` of each.

        Clients' requests run beside calls of `generate` and submissions, and a staged refit goes on
        beside them. A refit that pauses the engines, and their sleep, wait for requests that run,
        and what is asked for meanwhile waits until they sample again.

        Args:
            settings: How they serve. On several engines, ports count up from `port`.

        Raises:
            ValueError: A port is taken, or the engines serve already.
        """
        # A client has the address of one engine.
        self._engines.ranks_stand_alone = False
        return self._members.on_all("serve", settings)

    def is_serving(self) -> bool:
        """Return whether the server of every engine runs."""
        return all(self._members.on_all_beside("is_serving"))

    def stop_serving(self) -> None:
        """End the servers, if there are any; `shutdown` does the same."""
        self._members.on_all("stop_serving")

    # Weights

    def init_transfer(self, address: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
        """Set the sender of each receiver; a later call replaces it.

        Args:
            address: The `address` of an `rl_refit.RefitSender` for all `num_receivers` receivers,
                or one address for each of them. Receivers are ranked from 0, engine by engine.

        Raises:
            ValueError: The number of addresses is not the number of receivers.
        """
        single = isinstance(address, Mapping)
        addresses = [address] * self.num_receivers if single else list(address)
        if len(addresses) != self.num_receivers:
            raise ValueError(
                f"{len(addresses)} addresses do not fit {self.num_receivers} receivers"
            )
        self._members.connect(self._engines.ranks, addresses)
        # Engines that are started anew get them too.
        self._members.addresses = addresses

    def begin_update(
        self, version: int, *, staging: Staging = "off", kv_cache: KvCache = "drop"
    ) -> None:
        """Open a transaction on every engine.

        Args:
            version: Of the new weights.
            staging: "off": no engine samples until `commit_update`. "host": engines receive weights
                in host memory, beside those that they sample from, and exchange them between two
                steps at `commit_update`; requests go on, and an update that fails leaves the old
                version sampling. `generate` may run in another thread meanwhile. "auto": the same,
                on the devices or in host memory, if every engine has room for it, else "off".
            kv_cache: What a staged commit does to requests that run: "drop" computes their keys and
                values again with the new weights, "keep" goes on with the old ones.

        Raises:
            ValueError: `version` is not newer than an engine's committed version; an engine has no
                room for `staging="host"`; `kv_cache="keep"` where vLLM schedules ahead.
            EngineStateError: The weights of an engine are asleep.
        """
        self._updates.begin(version, staging=staging, kv_cache=kv_cache)

    def begin_catch_up(self, version: int) -> None:
        """Open a transaction on the engines that have joined; the others sample meanwhile.

        Args:
            version: The one that the others have.
        """
        self._updates.begin_catch_up(version)

    def update(self, version: int) -> RankCall:
        """Start to receive and load all weights on every engine, while the sender sends.

        Example, with a sender in this process:
            call = engines.update(3)
            sender.send(3)
            reports = engines.wait_for_update(call)

        Returns:
            A running call for `wait_for_update`. If it fails, the engines refuse to sample until a
            full resend is committed, except those whose update was staged.
        """
        return self._updates.submit(version)

    def commit_update(self, version: int) -> None:
        """Sample from the loaded weights from now on, with `version` as their `weight_version`.

        Raises:
            EngineStateError: An engine has not loaded all weights of `version`.
        """
        self._updates.commit(version)
        with self._counting:
            if version != self._version:
                self._version, self._calls_since_version = version, 0
                self._members.has_initial_weights = False

    def holds_base(self) -> bool:
        """Return whether every engine holds its sender's weights without adapters.

        Adapters alone are then enough, see `vllm_cfg.adapter_rank`.
        """
        self._members.advance()
        return not self._members.joining and all(self._members.on_all_beside("holds_base"))

    def update_metrics(self) -> dict[str, float]:
        """Return how the last update went.

        Returns:
            `refit_pause_s`, the seconds in which the engine that paused longest could not sample,
            and `refit_staged`, 1.0 if all engines sampled while they received.
        """
        return self._updates.metrics()

    def wait_for_update(self, call: RankCall) -> list[dict[str, float]]:
        """Wait for a call of `update`; return a report per receiver, or raise its root failure."""
        return self._updates.wait(call)

    def prepare_refit_info(self, info: RefitInfo) -> None:
        """Set `{name: (shape, wire dtype)}` of all tensors that the calls below load."""
        self._refit_info = dict(info)

    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[None]]:
        """Join a trainer's group, whose rank 0 listens at the address; `update` needs none.

        Args:
            ip: The trainer's address.
            port: A port there.
            world_size: `num_receivers` and the trainer.

        Returns:
            Futures that are not awaited, as the trainer has to join at the same time.
        """
        if world_size != self.num_receivers + 1:
            raise ValueError(
                f"world_size={world_size} does not fit {self.num_receivers} receivers and a trainer"
            )
        return self._engines.start_all(
            "init_collective", ip, port, world_size, timeout_s=self._timeout_s
        )

    def update_weights_from_collective(self) -> list[ray.ObjectRef[None]]:
        """Receive the tensors of `prepare_refit_info` over the group of `init_collective`.

        Returns:
            Futures that are not awaited, as the trainer has to broadcast at the same time.
        """
        return self._engines.start_all("update_from_collective", self._known_info())

    def update_weights(self, handles: DeviceHandles) -> bool:
        """Load one group of the tensors of `prepare_refit_info`; return True.

        Args:
            handles: `{device id: {name: handle}}`, handles of `rl_refit.compat.handles`.
        """
        self._members.on_all("update_from_handles", handles, list(self._known_info()))
        return True

    # The end

    def shutdown(self) -> bool:
        """End every process of the engines; True if all of them ended in order.

        Idempotent. The cluster stays up.
        """
        return self._group is None or self._group.shutdown()

    # Kept here, as the interpreter clears the names of modules before the last objects.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __del__(self) -> None:
        """Shut down, unless the interpreter exits, which ends the processes by itself."""
        if not self._is_finalizing():
            self.shutdown()

    def _seeded(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[Any]:
        """Return the checked rows with a seed each."""
        check_prompts(
            data,
            max_length=min(facts.max_model_len for facts in self.facts),
            vocab_size=min(facts.vocab_size for facts in self.facts),
        )
        seeds = row_seeds(
            data["input_ids"].shape[0],
            seed=self._seed,
            weight_version=self._version,
            call=self._calls_since_version,
        )
        rows = {key: data[key] for key in _ROW_KEYS if key in data}
        return BatchedDataDict(rows | {"sampling_seeds": seeds})

    def _count_call(self, *, greedy: bool) -> None:
        # Greedy calls draw nothing, so that an evaluation does not change a run's later samples.
        if not greedy:
            self._calls_since_version += 1

    def _known_info(self) -> RefitInfo:
        if not self._refit_info:
            raise RuntimeError("prepare_refit_info was not called: the tensors are not known")
        return self._refit_info

    @property
    def _engines(self) -> RayWorkerGroup:
        assert self._group is not None
        return self._group

    def _submit_generate(self, batch: BatchedDataDict[Any], *, greedy: bool) -> RankCall:
        self._members.advance()
        # Where none is left, the group refuses the call.
        alive = self._members.alive or list(range(self.num_engines))
        shards = dispatch.plan_in_order(batch, data_parallel=len(alive))
        # Nothing is sent to an engine without rows that has died.
        plans = [ShardPlan(rows=[], elem_counts_per_gb=[0])] * self.num_engines
        for engine, plan in zip(alive, shards, strict=True):
            plans[engine] = plan
        return self._engines.submit_sharded(
            "generate", batch, plans, sampling=self._sampling, greedy=greedy
        )


def _engine_grid(
    cluster: Cluster, per_node: Sequence[int] | None, tensor_parallel_size: int
) -> NamedSharding:
    nodes = bundle_nodes(cluster)
    places = rank_bundles(nodes, workers_per_node=per_node)
    ranks_per_node = Counter(nodes[group][bundle] for group, bundle in places)
    num_engines = count_engines(ranks_per_node, tensor_parallel_size=tensor_parallel_size)
    shape = (num_engines, tensor_parallel_size)
    grid = np.arange(num_engines * tensor_parallel_size).reshape(shape)
    return NamedSharding(grid, ["data_parallel", "tensor_parallel"])
