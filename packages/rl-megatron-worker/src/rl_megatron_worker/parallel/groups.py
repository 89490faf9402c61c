"""The parallel layout, planned in plain integers, and Megatron-core's process groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from megatron.core import parallel_state
from rl_interfaces import ParallelLayout
from rl_interfaces.backend.runtime import destroy_groups

if TYPE_CHECKING:
    import torch.distributed as dist

    from rl_megatron_worker.model.config import Architecture
    from rl_megatron_worker.runtime import Runtime

Section = Mapping[str, Any]
"""A resolved policy config or a section of it: every key has its documented type."""

_PATH = "policy.megatron_cfg"


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronLayout:
    """Parallel sizes, and the assignment of layers to pipeline stages.

    Ranks are in Megatron-core's order, from the fastest: tensor, context, data, pipeline, as in
    `ParallelLayout`. Within a stage experts have their own order: expert-tensor, expert,
    expert-data.

    Example, 4 ranks with tensor=2, pipeline=2:
        ranks 0 and 1 share the first half of the layers, ranks 2 and 3 the second
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Expert-parallel size."""
    expert_tensor: int = 1
    """Expert-tensor-parallel size."""
    virtual_stages: int | None = None
    """Model chunks per rank of an interleaved schedule; None without interleaving."""
    first_stage_layers: int | None = None
    """Layers of the first stage, if different."""
    last_stage_layers: int | None = None
    """Layers of the last stage, if different."""
    sequence_parallel: bool = False
    """Whether activations outside of tensor-parallel regions are sharded along the sequence."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def for_driver(self) -> ParallelLayout:
        """The layout as the driver sees it, which shards batches by it."""
        return ParallelLayout(
            data_parallel=self.data,
            pipeline_parallel=self.pipeline,
            context_parallel=self.context,
            tensor_parallel=self.tensor,
        )

    @property
    def experts_span_data_ranks(self) -> bool:
        """Whether expert-parallel groups contain ranks with different rows."""
        own = self.tensor * self.context
        return self.expert > 1 and own % (self.expert * self.expert_tensor) != 0

    @property
    def token_multiple(self) -> int:
        """The divisor of the padded length of each sequence, in tokens."""
        chunks = 2 * self.context if self.context > 1 else 1
        return chunks * (self.tensor if self.sequence_parallel else 1)


def plan_layout(section: Section, *, world_size: int) -> MegatronLayout:
    """Return the layout of `world_size` ranks under a resolved `policy.megatron_cfg`.

    Raises:
        ValueError: The sizes do not divide the world, or contradict each other.
    """
    tensor = section["tensor_model_parallel_size"]
    pipeline = section["pipeline_model_parallel_size"]
    context = section["context_parallel_size"]
    expert = section["expert_model_parallel_size"]
    # Megatron-core's default: experts are sharded like all other layers.
    expert_tensor = section.get("expert_tensor_parallel_size") or tensor
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    _check_divides(section, sizes, world_size=world_size)
    if world_size % (expert * expert_tensor * pipeline):
        raise ValueError(
            f"{_PATH}.expert_model_parallel_size={expert} times "
            f"expert_tensor_parallel_size={expert_tensor} times "
            f"pipeline_model_parallel_size={pipeline} does not divide world_size={world_size}"
        )
    _check_stages(section)
    _check_dispatcher(section)
    stages_per_rank = section.get("virtual_pipeline_model_parallel_size")
    return MegatronLayout(
        data=world_size // (tensor * pipeline * context),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        virtual_stages=None if stages_per_rank == 1 else stages_per_rank,
        first_stage_layers=section.get("num_layers_in_first_pipeline_stage"),
        last_stage_layers=section.get("num_layers_in_last_pipeline_stage"),
        # Over one rank nothing is sharded, and Megatron-core takes it for a mistake.
        sequence_parallel=section["sequence_parallel"] and tensor > 1,
    )


def check_sizes(
    architecture: Architecture, layout: MegatronLayout, *, recomputed_unit: int | None = None
) -> None:
    """Raise if the model does not divide by the parallel sizes.

    Args:
        architecture: The model's architecture.
        layout: The parallel layout.
        recomputed_unit: Layers recomputed as one unit; None without uniform recomputation.

    Raises:
        ValueError: A size does not divide; the message names key and numbers.
    """
    fields = architecture.transformer
    num_experts = fields.get("num_moe_experts")
    tensor, groups = layout.tensor, fields.get("num_query_groups") or fields["num_attention_heads"]
    divisions = [
        ("attention heads", fields["num_attention_heads"], "tensor_model_parallel_size", tensor),
        ("query groups", groups, "tensor_model_parallel_size", tensor),
        ("MLP units", fields["ffn_hidden_size"], "tensor_model_parallel_size", tensor),
    ]
    if any(fields.get("linear_attention_freq") or ()):
        heads = fields["linear_num_key_heads"]
        divisions.append(("linear key heads", heads, "tensor_model_parallel_size", tensor))
    if layout.sequence_parallel:
        hidden = fields["hidden_size"]
        divisions.append(("hidden units", hidden, "tensor_model_parallel_size", tensor))
    if num_experts:
        units = fields.get("moe_ffn_hidden_size") or fields["ffn_hidden_size"]
        divisions += [
            ("experts", num_experts, "expert_model_parallel_size", layout.expert),
            ("units per expert", units, "expert_tensor_parallel_size", layout.expert_tensor),
        ]
    for what, count, key, size in divisions:
        if count % size:
            raise ValueError(f"{_PATH}.{key}={size} does not divide the model's {count} {what}")
    _check_experts(num_experts, layout)
    for count in _layers_of_chunks(fields["num_layers"], layout):
        if recomputed_unit is not None and count % recomputed_unit:
            raise ValueError(
                f"{_PATH}.recompute_num_layers={recomputed_unit} does not divide the {count} "
                f"layers of a rank's chunk: {_PATH}.recompute_method='uniform' recomputes "
                "units of that many layers"
            )


def check_device(layout: MegatronLayout, *, on_cuda: bool) -> None:
    """Raise `ValueError` if this layout needs GPUs and there are none."""
    if layout.expert > 1 and layout.expert_tensor > 1 and not on_cuda:
        raise ValueError(
            f"{_PATH}.expert_model_parallel_size={layout.expert} with "
            f"{_PATH}.expert_tensor_parallel_size={layout.expert_tensor} needs GPUs: gloo cannot "
            "gather different numbers of tokens. Set one of them to 1"
        )


def init_model_parallel(layout: MegatronLayout, runtime: Runtime, *, timeout_s: float) -> None:
    """Create Megatron-core's groups in the default process group. Collective.

    Raises:
        ValueError: The device does not support this layout.
    """
    check_device(layout, on_cuda=runtime.on_cuda)
    with runtime.scope():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_stages,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            # Annotated as int, but passed to `timedelta`, which takes fractions.
            distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
        )


def leave_model_parallel() -> None:
    """Destroy Megatron-core's groups, which it only forgets itself. Not collective."""
    made = cast("list[dist.ProcessGroup | None]", parallel_state._global_process_group_list or [])
    # None in this list is the default group, which may not be ours.
    destroy_groups(group for group in made if group is not None)
    parallel_state.destroy_model_parallel()


def _check_divides(section: Section, keys: tuple[str, ...], *, world_size: int) -> None:
    product = 1
    for key in keys:
        if section[key] < 1:
            raise ValueError(f"{_PATH}.{key}={section[key]} must be at least 1")
        product *= section[key]
    if world_size % product:
        named = " times ".join(f"{_PATH}.{key}={section[key]}" for key in keys)
        raise ValueError(f"{named} does not divide world_size={world_size}")


def _check_stages(section: Section) -> None:
    """Raise if options of pipeline stages are set without pipeline parallelism."""
    pipeline = section["pipeline_model_parallel_size"]
    for key in (
        "virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    ):
        value = section.get(key)
        if value is None:
            continue
        if value < 1:
            raise ValueError(f"{_PATH}.{key}={value} must be at least 1")
        if pipeline == 1:
            raise ValueError(
                f"{_PATH}.{key}={value} needs {_PATH}.pipeline_model_parallel_size > 1, got 1"
            )


def _check_dispatcher(section: Section) -> None:
    """Raise if the all-gather dispatcher would meet ranks with different numbers of tokens."""
    dispatcher = section["moe_token_dispatcher_type"]
    if dispatcher not in ("alltoall", "allgather"):
        raise ValueError(
            f"{_PATH}.moe_token_dispatcher_type={dispatcher!r} must be 'alltoall' or 'allgather'"
        )
    for key in ("expert_model_parallel_size", "pipeline_model_parallel_size"):
        if dispatcher == "allgather" and section[key] > 1:
            raise ValueError(
                f"{_PATH}.moe_token_dispatcher_type='allgather' does not support sequences of "
                f"different length with {_PATH}.{key}={section[key]}: set 'alltoall'"
            )


def _check_experts(num_experts: int | None, layout: MegatronLayout) -> None:
    """Raise if the expert sizes contradict the model or the other parallel sizes."""
    tensor = layout.tensor
    if layout.expert > 1 and not num_experts:
        raise ValueError(
            f"{_PATH}.expert_model_parallel_size={layout.expert} needs an MoE model, "
            "which this one is not"
        )
    if num_experts and layout.expert == 1 and layout.expert_tensor != tensor:
        # Megatron-core would reduce such experts' gradients over the wrong ranks: the data-parallel
        # group of dense layers.
        raise ValueError(
            f"{_PATH}.expert_tensor_parallel_size={layout.expert_tensor} differs from "
            f"tensor_model_parallel_size={tensor}: that needs expert_model_parallel_size > 1, got 1"
        )
    if num_experts and tensor > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"{_PATH}.tensor_model_parallel_size={tensor} of an MoE model needs "
            f"{_PATH}.sequence_parallel=True"
        )


def _layers_of_chunks(num_layers: int, layout: MegatronLayout) -> list[int]:
    """Return the distinct numbers of layers per chunk.

    Raises:
        ValueError: The layers do not divide into stages, or those of a stage into chunks.
    """
    given = [each for each in (layout.first_stage_layers, layout.last_stage_layers) if each]
    others, stages = num_layers - sum(given), layout.pipeline - len(given)
    if others < 0 or (stages == 0 and others) or (stages and (others == 0 or others % stages)):
        raise ValueError(
            f"{_PATH}.pipeline_model_parallel_size={layout.pipeline} does not divide the model's "
            f"{num_layers} layers (first stage: {layout.first_stage_layers or 'as the others'}, "
            f"last stage: {layout.last_stage_layers or 'as the others'})"
        )
    chunks = layout.virtual_stages or 1
    counts = [*given, others // stages] if stages else given
    for count in counts:
        if count % chunks:
            raise ValueError(
                f"{_PATH}.virtual_pipeline_model_parallel_size={chunks} does not divide the "
                f"{count} layers of a stage"
            )
    return [count // chunks for count in counts]
