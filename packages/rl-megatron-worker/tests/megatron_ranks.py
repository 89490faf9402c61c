"""What the tests run on ranks: a job with a layout, a loaded model, and its passes."""

from contextlib import contextmanager
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from patience import PATIENCE_S
from reference_models import VOCAB, architecture_of, build_reference, shard_of
from rl_batched_data.logprobs import target_scores
from rl_interfaces.backend.runtime import RankEnvironment, init_process_group
from rl_megatron_worker.layout import PackedRows
from rl_megatron_worker.model.build import build_model, unwrapped
from rl_megatron_worker.model.config import ModelOptions, transformer_config
from rl_megatron_worker.model.heads import scoring_options
from rl_megatron_worker.parallel.groups import (
    check_sizes,
    init_model_parallel,
    leave_model_parallel,
    plan_layout,
)
from rl_megatron_worker.parallel.schedule import run_chunk
from rl_megatron_worker.runtime import Runtime
from tolerances import GRADIENTS, LOGPROBS, Expected, in_float64

# The sequences of some micro-batches: multiples of twice the ranks that share them.
LENGTHS = [[12, 8], [4], [8, 4, 16], [20]]


def section(**overrides):
    """Return a resolved `policy.megatron_cfg`."""
    return {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "moe_token_dispatcher_type": "alltoall",
    } | overrides


@contextmanager
def job(**overrides):
    """Give the runtime and the layout of a rank, its groups set up while inside."""
    environment = RankEnvironment.from_environment()
    init_process_group(environment, timeout_s=PATIENCE_S)
    runtime = Runtime(environment)
    layout = plan_layout(section(**overrides), world_size=environment.world_size)
    init_model_parallel(layout, runtime, timeout_s=PATIENCE_S)
    runtime.seed(0)
    try:
        yield runtime, layout
    finally:
        leave_model_parallel()
        torch.distributed.destroy_process_group()


def build(runtime, layout, reference, *, dtype=torch.float32, ddp=None, **options):
    """Return the chunks of this rank with the reference's weights, and Megatron-core's config."""
    architecture = architecture_of(reference)
    check_sizes(architecture, layout)
    config = transformer_config(
        architecture,
        layout,
        ModelOptions(params_dtype=dtype, **options),
        runtime,
    )
    ddp = ddp or DistributedDataParallelConfig()
    chunks = build_model(architecture, config, layout, runtime, ddp=ddp)
    expected = expected_parameters(chunks, dict(reference.named_parameters()), reference.config)
    with torch.no_grad():
        for parameter, value in expected:
            parameter.copy_(value)
    return chunks, config


def expected_parameters(chunks, tensors, reference_config):
    """Return each parameter of this rank with its part of transformers' tensors."""
    state = parallel_state
    cuts = {
        "tp": (
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
        ),
        "etp": (
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
        ),
        "ep": (
            state.get_expert_model_parallel_rank(),
            state.get_expert_model_parallel_world_size(),
        ),
    }
    pairs = []
    for chunk in chunks:
        model = unwrapped(chunk)
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.layers."):
                local = int(name.split(".")[2])
                layer = model.decoder.layers[local].layer_number - 1
                name = name.replace(f"layers.{local}.", f"layers.{layer}.", 1)
            pairs.append((parameter, shard_of(name, tensors, reference_config, **cuts)))
    return pairs


def make_micro_batch(index):
    """Return the tokens `[total]` and the lengths of a micro-batch."""
    lengths = LENGTHS[index % len(LENGTHS)]
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCAB, (sum(lengths),), generator=generator), lengths


def make_rows(lengths):
    edges = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    group = parallel_state.get_context_parallel_group()
    return PackedRows.of(edges, max_seqlen=max(lengths), group=group)


def run_schedule(runtime, chunks, config, micro_batches, *, forward_only=False):
    """Run Megatron-core's schedule; return each micro-batch's log-probabilities, of all tokens.

    The loss is the sum of the log-probabilities, each times the number of its token: gradients of
    any two tokens are told apart.
    """
    collected = []

    def forward_step(batches, chunk):
        tokens, lengths = next(batches)
        rows = make_rows(lengths)
        hidden = run_chunk(chunk, rows.shard(tokens), rows)
        return hidden, partial(_loss, chunk, rows, tokens, collected)

    with runtime.scope():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in chunks]
            if len(chunks) > 1
            else iter(micro_batches),
            model=chunks,
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return collected


def _loss(chunk, rows, tokens, collected, hidden):
    scores = target_scores(hidden, rows.shard(tokens.roll(-1)), **scoring_options(chunk))
    weights = rows.shard(token_weights(tokens))
    collected.append(rows.gather(scores.logprobs.detach()))
    loss = (scores.logprobs * weights).sum()
    return loss, torch.zeros((), dtype=torch.int), {"loss": loss.detach().clone()}


def token_weights(tokens):
    return torch.arange(1.0, len(tokens) + 1) / len(tokens)


def reference_logprobs(reference, tokens, lengths):
    """Return the same log-probabilities by transformers, one sequence at a time."""
    outputs = []
    targets = tokens.roll(-1)
    for row, target in zip(tokens.split(lengths), targets.split(lengths), strict=True):
        logits = reference(input_ids=row[None]).logits[0]
        outputs.append(logits.log_softmax(-1).gather(-1, target[:, None])[:, 0])
    return torch.cat(outputs)


def reference_pass(reference, tokens, lengths):
    """Return them, and add the gradients of the same loss."""
    logprobs = reference_logprobs(reference, tokens, lengths)
    (logprobs * token_weights(tokens)).sum().backward()
    return logprobs.detach()


def whole_model_ranks(*, kind, **overrides):
    """Return errors of log-probabilities and gradients against transformers' in float64.

    As shares of their bounds, which are multiples of the errors of transformers in float32.
    """
    with job(**overrides) as (runtime, layout):
        reference = build_reference(kind)
        chunks, config = build(runtime, layout, reference)
        config.finalize_model_grads_func = finalize_model_grads
        num = len(LENGTHS)
        batches = [make_micro_batch(index) for index in range(num * layout.data)]
        first = parallel_state.get_data_parallel_rank() * num
        logprobs = run_schedule(runtime, chunks, config, batches[first : first + num])
        oracle = in_float64(reference)
        exact, plain = (
            [reference_pass(model, *batch) for batch in batches] for model in (oracle, reference)
        )
        of_logprobs = bound_of(exact, plain, LOGPROBS)
        gradients = {name: each.grad for name, each in oracle.named_parameters()}
        rounded = [each.grad for each in reference.parameters()]
        of_gradients = bound_of(gradients.values(), rounded, GRADIENTS)
        pairs = expected_parameters(chunks, gradients, reference.config)
        mine = exact[first : first + num]
        return {
            "logprobs": [
                (own - other).abs().max().item() / of_logprobs
                for own, other in zip(logprobs, mine, strict=bool(logprobs))
            ],
            "gradients": [
                (parameter.main_grad - value).abs().max().item() / of_gradients
                for parameter, value in pairs
            ],
        }


def bound_of(exact, rounded, row):
    """Return the largest error that a row of the table allows of some tensors."""
    exact, rounded = (torch.cat([each.flatten() for each in side]) for side in (exact, rounded))
    error = float((exact - rounded).abs().max())
    return Expected(exact=exact, error=error, row=row).bound
