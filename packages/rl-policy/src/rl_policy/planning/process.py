"""What the process of `plan_memory` does: it traces a worker and composes the plan."""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.checkpoint.hf_files import load_model_config
from rl_interfaces.backend.memory import (
    Depths,
    MemoryTracedWorker,
    TokenIds,
    TraceRequest,
    WorkerTrace,
    empty_language_model,
    plan_depths,
    shallow_config,
    trace_worker,
    write_stand_in,
)
from rl_refit.plan import RefitPlan, TensorSpec, default_bucket_bytes, read_specs

from rl_policy import backends
from rl_policy.config import RefitSection, RunConfig, load_run_config
from rl_policy.data.tiny_model import tiny_model_config
from rl_policy.data.user_code import end_with_parent
from rl_policy.dispatch import TokenBudget
from rl_policy.generation.vllm.config import generation_of_policy, parse_engine_config
from rl_policy.planning.compose import RunMemory, compose
from rl_policy.planning.engines import share_of_engine
from rl_policy.recipes import find_recipe

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

    from rl_interfaces import ParallelLayout
    from transformers import PreTrainedConfig

_NUM_BUFFERS = 2
_TRACE_LIMIT_S = 540.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The run that is planned: its configuration, its model and its layout."""

    config: RunConfig
    policy: dict[str, Any]
    worker_class: Any
    model_config: PreTrainedConfig
    layout: ParallelLayout
    world_size: int

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.policy["max_total_sequence_length"]

    @property
    def on_gpu(self) -> bool:
        """Whether the run's devices are GPUs, as where it does not say."""
        return self.config.cluster.use_gpus is not False


def main() -> None:
    """Write a plan, or what is wrong with the request."""
    result = Path(sys.argv[1])
    end_with_parent()
    try:
        answer = _plan(json.load(sys.stdin))
    except (ValueError, NotImplementedError) as error:
        answer = {"error": " ".join(str(error).split())}
    result.write_text(json.dumps(answer))


def _plan(request: Mapping[str, Any]) -> dict[str, Any]:
    subject = _subject(request)
    model = empty_language_model(
        subject.model_config, trust_remote_code=subject.policy["trust_remote_code"]
    )
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    if has_experts and subject.policy["precision"] != "bfloat16":
        # torch has their grouped matrix product without memory in bfloat16 alone.
        raise ValueError(
            f"policy.precision={subject.policy['precision']} cannot be planned for the mixture of "
            f"experts in policy.model_name={subject.policy['model_name']!r}: plan with "
            "policy.precision=bfloat16"
        )
    layers = subject.worker_class.repeated_layers(model)
    total = sum(each.numel() for each in model.parameters())
    depths = plan_depths(
        subject.model_config,
        layers,
        num_other_parameters=total - sum(p.numel() for each in layers for p in each.parameters()),
        tensor_parallel=subject.layout.tensor_parallel,
        all_layers=request["all_layers"],
    )
    traces = _trace_depths(subject, depths)
    bucket = _bucket_bytes(subject, traces[max(traces)], num_parameters=total)
    run = RunMemory(
        traces=traces,
        depths=depths,
        buffer_bytes=0 if bucket is None else _NUM_BUFFERS * bucket,
        on_gpu=subject.on_gpu,
        engine=None,
    )
    if subject.config.has_engines:
        section = generation_of_policy(subject.policy)
        config = parse_engine_config(section, seed=0, path="policy.generation")
        engine = share_of_engine(
            config,
            subject.model_config,
            model,
            memory=request["memory"],
            reserve=request["reserve"],
            beside=sum(part.bytes for part in run.beside_engine(config.is_colocated)),
        )
        run = replace(run, engine=engine)
    plan = compose(
        run,
        policy=subject.policy,
        layout=subject.layout,
        text=subject.model_config.get_text_config(),
        memory=request["memory"],
        reserve=request["reserve"],
        bucket_bytes=bucket,
        num_parameters=total,
    )
    return plan.to_json()


def _subject(request: Mapping[str, Any]) -> Subject:
    config = load_run_config(
        request["recipe"],
        path=None if request["config"] is None else Path(request["config"]),
        overrides=[
            *request["settings"],
            f"cluster.bundle_ct_per_node_list={json.dumps(request['bundles'])}",
        ],
    )
    recipe = find_recipe(config.recipe)
    if recipe.num_policies > 1:
        raise NotImplementedError(
            f"recipe={config.recipe!r} has {recipe.num_policies} policies on the same devices, and "
            "rl-policy plan counts one: plan each as a policy of grpo, of which the other's "
            "parameters are off while it works"
        )
    policy = dict(next(iter(recipe.policies(config).values())))
    backend = backends.TrainingBackend.of_config(policy)
    if not hasattr(backend.worker_class, "repeated_layers"):
        raise NotImplementedError(
            f"policy.{backend.name}_cfg.enabled=True: rl-policy plan cannot trace the backend "
            f"{backend.name!r}, whose {backend.worker_class.__name__} lacks repeated_layers of "
            f"{MemoryTracedWorker.__name__}: plan with policy.dtensor_cfg.enabled=true, or take a "
            "step, whose peak_memory_gib is in metrics.jsonl"
        )
    _refuse_untraceable(policy)
    world_size = sum(request["bundles"])
    longest = policy.get("max_total_sequence_length")
    with tempfile.TemporaryDirectory() as directory:
        if config.has_builtin_model:
            shape = tiny_model_config(config.tiny_model, max_sequence_length=longest or 1)
            shape.save_pretrained(directory)
            policy["model_name"] = directory
        model_config = load_model_config(
            policy["model_name"], trust_remote_code=policy["trust_remote_code"]
        )
        layout = backend.worker_class.validate_config(
            policy, world_size=world_size, init_optimizer=True
        )
    if longest is None:
        longest = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        if longest is None:
            raise ValueError(
                f"policy.model_name={policy['model_name']!r} has no maximum length: set "
                "policy.max_total_sequence_length to the tokens that a row may have"
            )
        policy["max_total_sequence_length"] = longest
    return Subject(
        config=config,
        policy=policy,
        worker_class=backend.worker_class,
        model_config=model_config,
        layout=layout,
        world_size=world_size,
    )


def _refuse_untraceable(policy: Mapping[str, Any]) -> None:
    """Raise for what a trace does not follow, or has not been held against real ranks."""
    section = policy["dtensor_cfg"]
    ways: dict[str, tuple[bool, str]] = {
        "cpu_offload": (
            section["cpu_offload"],
            "leave it out, and take the plan's parameters and optimizer state off",
        ),
        "lora.enabled": (
            section["lora"]["enabled"],
            "leave it out: a plan without adapters is an upper bound",
        ),
    }
    for key, (is_set, way) in ways.items():
        if is_set:
            raise ValueError(f"policy.dtensor_cfg.{key}=True cannot be planned: {way}")


def _trace_depths(subject: Subject, depths: Depths) -> dict[int, WorkerTrace]:
    """Return the trace of each depth; they run at the same time."""
    deadline = time.monotonic() + _TRACE_LIMIT_S
    children = {depth: _start(partial(_trace_depth, subject, depth)) for depth in depths.traced}
    try:
        return {depth: _receive(*child, deadline=deadline) for depth, child in children.items()}
    finally:
        for process, connection in children.values():
            connection.close()
            process.kill()
            process.join()


def _start(function: Callable[[], WorkerTrace]) -> tuple[ForkProcess, Connection]:
    """Start a process that sends what `function` returns, or an error that it raises."""
    # Nothing has started a thread yet, and a fork need not import torch again.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        end_with_parent()
        try:
            theirs.send(function())
        except Exception as error:
            traceback.print_exc()
            theirs.send(error if isinstance(error, ValueError) else RuntimeError(repr(error)))

    process = context.Process(target=run, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _receive(process: ForkProcess, connection: Connection, *, deadline: float) -> WorkerTrace:
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise RuntimeError(f"a trace took more than {_TRACE_LIMIT_S:.0f} s")
    try:
        received = connection.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a trace ended with status {process.exitcode}") from None
    if isinstance(received, Exception):
        raise received
    return received


def _trace_depth(subject: Subject, depth: int) -> WorkerTrace:
    config = subject.model_config
    if depth != config.get_text_config().num_hidden_layers:
        config = shallow_config(config, depth)
    policy = copy.deepcopy(subject.policy)
    with tempfile.TemporaryDirectory() as directory:
        write_stand_in(config, Path(directory), trust_remote_code=policy["trust_remote_code"])
        policy["model_name"] = directory
        request = trace_request(replace(subject, policy=policy))
        text = config.get_text_config()
        end = text.eos_token_id
        tokenizer = TokenIds(eos_token_id=end[0] if isinstance(end, list) else end)
        return trace_worker(subject.worker_class, request, tokenizer=tokenizer)


def trace_request(subject: Subject) -> TraceRequest:
    """Return what is traced of a run: its largest micro-batches, of rows of the longest length."""
    policy, config, ranks = subject.policy, subject.config, subject.layout.data_parallel
    per_rank = policy["train_global_batch_size"] // ranks
    scored = _rows(subject, "logprob_mb_tokens", policy["logprob_batch_size"], num_batches=1)
    trained = _rows(
        subject,
        "train_mb_tokens",
        policy["train_micro_batch_size"],
        num_batches=2,
        most=per_rank,
    )
    samples = find_recipe(config.recipe).samples_with_engines and not config.has_engines
    prompts = None
    if samples:
        rows = full_rows([subject.longest - 1] * policy["generation_batch_size"])
        prompts = BatchedDataDict({key: rows[key] for key in ("input_ids", "input_lengths")})
    return TraceRequest(
        policy=policy,
        world_size=subject.world_size,
        has_optimizer=True,
        has_cuda_kernels=subject.on_gpu,
        training_rows=trained,
        scored_rows=scored,
        prompts=prompts,
        is_sending=config.has_engines,
        gbs=trained.size * ranks,
    )


def _rows(
    subject: Subject, budget_key: str, rows: int, *, num_batches: int, most: int | None = None
) -> BatchedDataDict[Any]:
    """Return rows of full micro-batches, with their plan where a budget of tokens makes them."""
    longest = subject.longest
    budget = TokenBudget.from_config(subject.policy, budget_key)
    if budget is None:
        count = num_batches * rows
        return full_rows([longest] * (count if most is None else max(1, min(count, most))))
    arguments: Any = budget.dynamic_batching_args or budget.sequence_packing_args
    full, rest = divmod(arguments["max_tokens_per_microbatch"], longest)
    # A row of one token has no target.
    lengths = [longest] * full + ([rest] if rest > 1 and budget.sequence_packing_args else [])
    batch = full_rows(lengths * num_batches)
    try:
        (plan,) = batch.plan_by_batch_size(
            1,
            batch_size=batch.size,
            dynamic_batching_args=budget.dynamic_batching_args,
            sequence_packing_args=budget.sequence_packing_args,
        )
    except ValueError as error:
        raise ValueError(f"{budget.key}: {error}") from error
    return batch.apply_plan(plan)


def full_rows(lengths: list[int]) -> BatchedDataDict[Any]:
    """Return rows of these lengths, all of whose tokens but the first are targets.

    Args:
        lengths: Tokens of each row.
    """
    width, count = max(lengths, default=1), len(lengths)
    sizes = torch.tensor(lengths)
    is_token = torch.arange(width) < sizes[:, None]
    # Rows differ, as a prompt that several have is read once.
    tokens = torch.arange(count)[:, None].remainder(7).add(1).expand(count, width)
    mask = is_token.float()
    mask[:, :1] = 0
    return BatchedDataDict(
        {
            "input_ids": torch.where(is_token, tokens, 0),
            "input_lengths": sizes,
            "token_mask": mask,
            "sample_mask": torch.ones(count),
        }
    )


def _bucket_bytes(subject: Subject, trace: WorkerTrace, *, num_parameters: int) -> int | None:
    """Return the bytes of a refit's largest bucket; None without engines."""
    if not subject.config.has_engines:
        return None
    specs = read_specs(
        [(name, getattr(torch, dtype), shape) for name, dtype, shape in trace.weights]
    )
    given = subject.config.section(RefitSection).bucket_mib
    if given is not None:
        return RefitPlan.of(specs, given * 2**20).largest_bucket
    # The default is an eighth of the full model, of which the trace may have some layers.
    eighth = TensorSpec("", specs[0].dtype, (num_parameters // 8,))
    wanted = max(default_bucket_bytes(specs), default_bucket_bytes([eighth] * 8))
    return RefitPlan.of(specs, wanted).largest_bucket
