"""How the ranks share the model, planned in plain numbers, and Megatron-core's groups of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from rl_interfaces import ParallelLayout
from rl_interfaces.backend.runtime.ranks import destroy_groups

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_megatron_worker.model.architecture import Architecture
    from rl_megatron_worker.runtime import Runtime

_PATH = "policy.megatron_cfg"


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronLayout:
    """The sizes of the groups of ranks, and how the layers are dealt out.

    Ranks stand in Megatron-core's order, tensor-parallel ones next to each other, then context-,
    data- and pipeline-parallel ones: the order of `ParallelLayout`. The ranks of one pipeline stage
    have the experts in an order of their own: expert-tensor-, expert-, expert-data-parallel.

    Example, 4 ranks with tensor=2, pipeline=2:
        ranks 0 and 1 share the first half of the layers, ranks 2 and 3 the second
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Ranks over which experts are dealt out."""
    expert_tensor: int = 1
    """Ranks that share each expert."""
    virtual_stages: int | None = None
    """Model chunks of each rank, where there are several."""
    first_stage_layers: int | None = None
    """Layers of the first stage, where stages differ."""
    last_stage_layers: int | None = None
    """Layers of the last stage, where stages differ."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks share the sequence between the parts that they share."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def for_driver(self) -> ParallelLayout:
        """The same, as far as the driver needs it to deal out rows."""
        return ParallelLayout(
            data_parallel=self.data,
            pipeline_parallel=self.pipeline,
            context_parallel=self.context,
            tensor_parallel=self.tensor,
        )

    @property
    def deals_experts_to_rows(self) -> bool:
        """Whether experts are dealt out over ranks that have rows of their own."""
        own = self.tensor * self.context
        return self.expert > 1 and own % (self.expert * self.expert_tensor) != 0

    @property
    def token_multiple(self) -> int:
        """What the tokens of each sequence, padding included, have to be a multiple of."""
        chunks = 2 * self.context if self.context > 1 else 1
        return chunks * (self.tensor if self.sequence_parallel else 1)


def plan_layout(section: Mapping[str, Any], *, world_size: int) -> MegatronLayout:
    """Return the layout of `world_size` ranks under a resolved `policy.megatron_cfg`.

    Raises:
        ValueError: The sizes do not divide the world, or contradict each other.
    """
    tensor = section["tensor_model_parallel_size"]
    pipeline = section["pipeline_model_parallel_size"]
    context = section["context_parallel_size"]
    expert = section["expert_model_parallel_size"]
    # Megatron-core's own default: experts are cut like everything else.
    expert_tensor = section.get("expert_tensor_parallel_size") or tensor
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    _check_divides(section, sizes, world_size=world_size)
    if world_size % (expert * expert_tensor * pipeline):
        raise ValueError(
            f"{_PATH}.expert_model_parallel_size={expert} times "
            f"expert_tensor_parallel_size={expert_tensor} times "
            f"pipeline_model_parallel_size={pipeline} does not divide world_size={world_size}"
        )
    if section["sequence_parallel"] and tensor == 1:
        raise ValueError(
            f"{_PATH}.sequence_parallel=True needs {_PATH}.tensor_model_parallel_size > 1, got 1"
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
        sequence_parallel=section["sequence_parallel"],
    )


def check_sizes(
    architecture: Architecture, layout: MegatronLayout, *, recomputed_unit: int | None = None
) -> None:
    """Refuse a model that does not divide into what ranks have.

    Args:
        architecture: The model.
        layout: The ranks.
        recomputed_unit: Layers that are computed again together; None where layers are not.

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
                f"layers that a rank has together: {_PATH}.recompute_method='uniform' computes "
                "units of so many again"
            )


def check_device(layout: MegatronLayout, *, on_cuda: bool) -> None:
    """Raise `ValueError` where ranks without GPUs cannot have this layout."""
    if layout.expert > 1 and layout.expert_tensor > 1 and not on_cuda:
        raise ValueError(
            f"{_PATH}.expert_model_parallel_size={layout.expert} with "
            f"{_PATH}.expert_tensor_parallel_size={layout.expert_tensor} needs GPUs: gloo cannot "
            "gather unlike numbers of tokens. Set one of them to 1"
        )


def init_model_parallel(layout: MegatronLayout, runtime: Runtime, *, timeout_s: float) -> None:
    """Set up Megatron-core's groups; the default process group is there. Collective.

    Raises:
        ValueError: The device cannot have this layout.
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
            # It is made a `timedelta` of, which takes fractions.
            distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
        )


def leave_model_parallel() -> None:
    """End Megatron-core's groups, which it only forgets. Not collective."""
    made: list[Any] = parallel_state._global_process_group_list or []
    # None stands for the default group there.
    destroy_groups(group for group in made if group is not None)
    parallel_state.destroy_model_parallel()


def _check_divides(section: Mapping[str, Any], keys: tuple[str, ...], *, world_size: int) -> None:
    product = 1
    for key in keys:
        if section[key] < 1:
            raise ValueError(f"{_PATH}.{key}={section[key]} must be at least 1")
        product *= section[key]
    if world_size % product:
        named = " times ".join(f"{_PATH}.{key}={section[key]}" for key in keys)
        raise ValueError(f"{named} does not divide world_size={world_size}")


def _check_stages(section: Mapping[str, Any]) -> None:
    """Refuse what says how pipeline stages differ where there is one stage."""
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


def _check_dispatcher(section: Mapping[str, Any]) -> None:
    """Refuse to gather tokens for experts where ranks or stages have unlike numbers of them."""
    dispatcher = section["moe_token_dispatcher_type"]
    if dispatcher not in ("alltoall", "allgather"):
        raise ValueError(
            f"{_PATH}.moe_token_dispatcher_type={dispatcher!r} must be 'alltoall' or 'allgather'"
        )
    for key in ("expert_model_parallel_size", "pipeline_model_parallel_size"):
        if dispatcher == "allgather" and section[key] > 1:
            raise ValueError(
                f"{_PATH}.moe_token_dispatcher_type='allgather' takes no sequences of unlike "
                f"length with {_PATH}.{key}={section[key]}: set 'alltoall'"
            )


def _check_experts(num_experts: int | None, layout: MegatronLayout) -> None:
    """Refuse sizes of experts that the model, or what else is shared, does not go with."""
    tensor = layout.tensor
    if layout.expert > 1 and not num_experts:
        raise ValueError(
            f"{_PATH}.expert_model_parallel_size={layout.expert} needs a mixture of experts, "
            "which the model is not"
        )
    if not num_experts and layout.expert_tensor != tensor:
        raise ValueError(
            f"{_PATH}.expert_tensor_parallel_size={layout.expert_tensor} differs from "
            f"tensor_model_parallel_size={tensor}: that needs a mixture of experts, which the "
            "model is not"
        )
    if num_experts and layout.expert == 1 and layout.expert_tensor != tensor:
        # Megatron-core sums such experts' gradients over the ranks that share rows alone.
        raise ValueError(
            f"{_PATH}.expert_tensor_parallel_size={layout.expert_tensor} differs from "
            f"tensor_model_parallel_size={tensor}: that needs expert_model_parallel_size > 1, got 1"
        )
    if num_experts and tensor > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"{_PATH}.tensor_model_parallel_size={tensor} of a mixture of experts needs "
            f"{_PATH}.sequence_parallel=True"
        )


def _layers_of_chunks(num_layers: int, layout: MegatronLayout) -> list[int]:
    """Return the unlike numbers of layers that chunks have.

    Raises:
        ValueError: They do not divide into stages, of which the first and last may be given.
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
