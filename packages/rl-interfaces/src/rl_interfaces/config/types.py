"""The configuration of a policy, as the plain dicts that a YAML file gives.

Every key may be left out or be None, which both mean "not set": the defaults stand in
`rl_interfaces.config.resolve`, which also refuses what is misspelt or mistyped.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias

from typing_extensions import TypedDict

from rl_interfaces.generation import GenerationConfig

ResolvedConfig: TypeAlias = "dict[str, Any]"
"""A `PolicyConfig` after `resolve_policy_config`, or a section of it: keys and types are checked,
defaults filled in and unset keys left out. Sections of third-party backends have keys of their own,
so that this is no TypedDict."""

SchedulerMilestones = dict[str, list[int]]
"""`{"milestones": [n, ...]}`: the `train` calls at which a list's next scheduler takes over."""


class LoraConfig(TypedDict):
    """Low-rank adapters, trained in place of the model's weights; the keys are peft's."""

    enabled: bool
    """Train adapters, and leave the weights as they are."""
    r: NotRequired[int]
    """Rank of each adapter."""
    lora_alpha: NotRequired[float]
    """An adapter's product is scaled by `lora_alpha / r`."""
    lora_dropout: NotRequired[float]
    """Share of an adapter's inputs that is dropped in training, and in training alone."""
    target_modules: NotRequired[str | list[str]]
    """Linear layers by the ends of their names, a pattern of whole names, or `all-linear`: each but
    the output layer."""
    adapter_path: NotRequired[str]
    """A directory in peft's format to start from, whose numbers are those given here. The reference
    stays the model without adapters."""


class DTensorConfig(TypedDict):
    """The FSDP2 and DTensor backend."""

    enabled: bool
    """Use this backend."""
    cpu_offload: bool
    """FSDP keeps parameters, gradients and optimizer state on the CPU between uses."""
    sequence_parallel: bool
    """Shard activations along the sequence between tensor-parallel regions."""
    activation_checkpointing: bool
    """Recompute each layer's activations in the backward pass."""
    tensor_parallel_size: int
    """Ranks that share each layer's matrices."""
    context_parallel_size: int
    """Ranks that share each sequence."""
    custom_parallel_plan: str | None
    """Dotted path to a tensor-parallel plan: a dict, or a function that returns one."""
    async_checkpoint: NotRequired[bool]
    """Copy a checkpoint to the CPU and write it while training goes on."""
    data_parallel_replicate_size: NotRequired[int]
    """Whole copies of the sharded model: hybrid sharding where it is more than 1."""
    lora: NotRequired[LoraConfig]
    """Train low-rank adapters."""


class SequencePackingConfig(TypedDict):
    """Micro-batches of concatenated sequences, without padding."""

    enabled: bool
    """Pack."""
    train_mb_tokens: int
    """Most tokens per micro-batch in `train`."""
    logprob_mb_tokens: int
    """Most tokens per micro-batch in log-probabilities."""
    algorithm: str
    """Name of the packer."""


class DynamicBatchingConfig(TypedDict):
    """Micro-batches of as many padded rows as a token budget holds."""

    enabled: bool
    """Batch dynamically."""
    train_mb_tokens: int
    """Most tokens, padding included, per micro-batch in `train`."""
    logprob_mb_tokens: int
    """Most tokens, padding included, per micro-batch in log-probabilities."""
    sequence_length_round: int
    """Micro-batch widths are multiples of this many tokens."""


class MegatronOptimizerConfig(TypedDict):
    """Megatron-core's optimizer; the keys are its own."""

    optimizer: str
    """`adam` or `sgd`."""
    lr: float
    """Learning rate."""
    min_lr: float
    """Learning rate at the end of the decay."""
    weight_decay: float
    """Weight decay, not applied to one-dimensional parameters."""
    bf16: bool
    """Train in bfloat16."""
    fp16: bool
    """Train in float16."""
    params_dtype: str
    """Dtype of the parameters."""
    adam_beta1: float
    """Adam's first decay."""
    adam_beta2: float
    """Adam's second decay."""
    adam_eps: float
    """Adam's epsilon."""
    sgd_momentum: float
    """SGD's momentum."""
    use_distributed_optimizer: bool
    """Shard the optimizer state over data-parallel ranks."""
    use_precision_aware_optimizer: bool
    """Keep optimizer state in lower precision; `rl-megatron-worker` refuses it."""
    clip_grad: float
    """Largest gradient norm."""


class MegatronSchedulerConfig(TypedDict):
    """Megatron-core's parameter scheduler; the keys are its own."""

    start_weight_decay: float
    """Weight decay at the first step."""
    end_weight_decay: float
    """Weight decay at the last step."""
    weight_decay_incr_style: str
    """`constant`, `linear` or `cosine`."""
    lr_decay_style: str
    """`constant`, `linear`, `cosine` or `inverse-square-root`."""
    lr_decay_iters: int | None
    """`train` calls over which the rate decays."""
    lr_warmup_iters: int
    """`train` calls over which the rate rises."""
    lr_warmup_init: float
    """Learning rate at the first step."""


class MegatronDDPConfig(TypedDict):
    """Megatron-core's distributed data parallelism; the keys are its own."""

    grad_reduce_in_fp32: bool
    """Reduce gradients in float32."""
    overlap_grad_reduce: bool
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool
    """Gather parameters during the forward pass."""
    average_in_collective: bool
    """Average in the collective instead of before it."""
    use_custom_fsdp: bool
    """Use Megatron's own fully sharded data parallelism."""
    data_parallel_sharding_strategy: str
    """What that shards; read with `use_custom_fsdp` alone."""


class MegatronConfig(TypedDict):
    """The Megatron-core backend."""

    enabled: bool
    """Use this backend."""
    empty_unused_memory_level: int
    """0: never; 1: return cached memory after each pass; 2: after each step too."""
    activation_checkpointing: bool
    """Recompute each layer's activations in the backward pass."""
    converter_type: str
    """Entry of the converter registry; `auto` takes the model's own."""
    tensor_model_parallel_size: int
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int
    """Ranks that share the stack of layers."""
    num_layers_in_first_pipeline_stage: int | None
    """Layers of the first stage, where stages differ."""
    num_layers_in_last_pipeline_stage: int | None
    """Layers of the last stage, where stages differ."""
    context_parallel_size: int
    """Ranks that share each sequence."""
    pipeline_dtype: str
    """Dtype of what stages send each other."""
    sequence_parallel: bool
    """Shard activations along the sequence between tensor-parallel regions."""
    virtual_pipeline_model_parallel_size: NotRequired[int | None]
    """Stages on each rank of the pipeline, which take turns (interleaved 1F1B)."""
    expert_model_parallel_size: NotRequired[int]
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: NotRequired[int | None]
    """Ranks that share each expert's matrices; as many as the other matrices' where not set."""
    recompute_granularity: NotRequired[str]
    """`full` layers or `selective`, attention alone; read with `activation_checkpointing`."""
    recompute_method: NotRequired[str]
    """Of `full`: `uniform` or `block`."""
    recompute_num_layers: NotRequired[int]
    """Of `full`: layers of a unit (`uniform`), or layers that are recomputed (`block`)."""
    moe_router_load_balancing_type: NotRequired[str]
    """How tokens are balanced over experts: `none` or `aux_loss`."""
    moe_aux_loss_coeff: NotRequired[float]
    """Weight of `aux_loss`; 0 adds none."""
    moe_token_dispatcher_type: NotRequired[str]
    """How tokens travel to experts: `alltoall` or `allgather`."""
    optimizer: NotRequired[MegatronOptimizerConfig]
    """The optimizer."""
    scheduler: NotRequired[MegatronSchedulerConfig]
    """The scheduler."""
    distributed_data_parallel_config: MegatronDDPConfig
    """Data parallelism."""


class TokenizerConfig(TypedDict):
    """The tokenizer."""

    name: str
    """Name or directory; the model's own when absent."""
    chat_template: NotRequired[str | None]
    """A Jinja template that replaces the tokenizer's own."""


class PytorchOptimizerConfig(TypedDict):
    """An optimizer by dotted name."""

    name: str
    """For example `torch.optim.AdamW`."""
    kwargs: dict[str, object]
    """Its keyword arguments."""


class SinglePytorchSchedulerConfig(TypedDict):
    """A learning-rate scheduler by dotted name; it steps once per `train` call."""

    name: str
    """For example `torch.optim.lr_scheduler.LinearLR`."""
    kwargs: dict[str, object]
    """Its keyword arguments."""


class PolicyConfig(TypedDict):
    """A policy. Only `model_name`, and `optimizer` where it trains, have to be given."""

    model_name: str
    """Hugging Face name or directory of the model."""
    head: NotRequired[str]
    """`language_model`, or what gives scores instead of tokens: `reward`, one per row, or `value`,
    one per token."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    train_global_batch_size: int
    """Samples per optimizer step over all data-parallel ranks."""
    train_micro_batch_size: int
    """Samples per forward per rank in `train`."""
    learning_rate: float
    """The optimizer's rate where its kwargs give none."""
    logprob_batch_size: int
    """Samples per forward per rank in log-probabilities."""
    generation: GenerationConfig | None
    """How completions are sampled. None: the policy does not generate."""
    generation_batch_size: NotRequired[int]
    """Rows per forward per rank in `generate`."""
    precision: str
    """`float32`, `bfloat16` or `float16`: the dtype of compute. Master weights are float32."""
    dtensor_cfg: DTensorConfig
    """The FSDP2 and DTensor backend."""
    megatron_cfg: MegatronConfig
    """The Megatron-core backend."""
    dynamic_batching: DynamicBatchingConfig
    """Micro-batches by token budget."""
    sequence_packing: SequencePackingConfig
    """Micro-batches without padding."""
    make_sequence_length_divisible_by: int
    """Widths are padded inside to a multiple of this many tokens."""
    max_total_sequence_length: int
    """Most tokens per sequence, prompt and completion."""
    max_grad_norm: float | int | None
    """Gradients are scaled down to this norm. None: they are not."""
    fsdp_offload_enabled: bool
    """The same as `dtensor_cfg.cpu_offload`, for every FSDP backend."""
    activation_checkpointing_enabled: bool
    """The same as the backend's `activation_checkpointing`."""
    optimizer: NotRequired[PytorchOptimizerConfig]
    """The optimizer."""
    scheduler: NotRequired[
        list[SinglePytorchSchedulerConfig | SchedulerMilestones]
        | SinglePytorchSchedulerConfig
        | SchedulerMilestones
    ]
    """One scheduler, or a list of them with one `{"milestones": [...]}`. Absent: constant rate."""
    seed: NotRequired[int]
    """Of sampling and of whatever else is random in a worker."""
    trust_remote_code: NotRequired[bool]
    """Let a checkpoint's own Python code run. Only for checkpoints whose code you have read."""
    timeout_s: NotRequired[float]
    """Seconds after which a wait of one rank for another fails."""
    profile_dir: NotRequired[str]
    """Directory of the traces that `start_gpu_profiling` leaves on a CPU."""
