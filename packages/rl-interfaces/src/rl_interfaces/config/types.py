"""The configuration of a policy: TypedDicts of the plain dicts that are read from YAML.

Every key may be missing or None, which both mean "not set". `rl_interfaces.config.resolve` has the
defaults and rejects unknown keys and wrong types.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from rl_interfaces.generation import GenerationConfig

ResolvedConfig: TypeAlias = "dict[str, Any]"
"""A `PolicyConfig` after `resolve_policy_config`, or a section of it: keys and types are checked,
defaults filled in and unset keys left out. Sections of third-party backends have keys of their own,
so that this is no TypedDict."""

SchedulerMilestones = dict[str, list[int]]
"""`{"milestones": [n, ...]}`: the `train` calls at which the next scheduler of the list starts."""


class LoraConfig(TypedDict):
    """Low-rank adapters, trained instead of the model's weights; the keys are peft's."""

    enabled: bool
    """Train adapters and freeze the model's weights."""
    r: NotRequired[int]
    """Rank of each adapter."""
    lora_alpha: NotRequired[float]
    """An adapter's product is scaled by `lora_alpha / r`."""
    lora_dropout: NotRequired[float]
    """Dropout probability of an adapter's inputs, in train mode only."""
    target_modules: NotRequired[str | list[str]]
    """Linear layers: a list of name suffixes, a regular expression of full names, or `all-linear`:
    all but the output layer."""
    adapter_path: NotRequired[str]
    """A directory in peft's format with initial adapters; their `r` and `lora_alpha` must match.
    The reference is the model without adapters."""


class DTensorConfig(TypedDict):
    """The FSDP2 and DTensor backend."""

    enabled: bool
    """Use this backend."""
    cpu_offload: bool
    """Offload parameters, gradients and optimizer state to the CPU between uses (FSDP2)."""
    sequence_parallel: bool
    """Shard activations along the sequence between tensor-parallel regions."""
    activation_checkpointing: bool
    """Recompute each layer's activations in the backward pass."""
    tensor_parallel_size: int
    """Ranks over which each layer's matrices are sharded."""
    context_parallel_size: int
    """Ranks over which each sequence is sharded."""
    custom_parallel_plan: str | None
    """Dotted path to a tensor-parallel plan: a dict, or a function that returns one."""
    attn_implementation: NotRequired[str]
    """Attention of transformers: `sdpa`, `eager`, `flex_attention`, `flash_attention_2` or another
    name that it knows. Not set: transformers' choice for the model."""
    model_dropout: NotRequired[bool]
    """Train with the dropout of the model's config; otherwise it is off, as it is in scoring."""
    async_checkpoint: NotRequired[bool]
    """Copy a checkpoint to the CPU and write it in the background."""
    data_parallel_replicate_size: NotRequired[int | Literal["auto"]]
    """Replicas of the sharded model; more than 1 is hybrid sharding (HSDP). `auto`: a model with a
    training state of at most 256 MiB is replicated on every data-parallel rank, a larger one is
    sharded over all of them."""
    lora: NotRequired[LoraConfig]
    """Train low-rank adapters."""


class SequencePackingConfig(TypedDict):
    """Micro-batches of packed sequences, without padding."""

    enabled: bool
    """Use sequence packing."""
    train_mb_tokens: int
    """Maximum tokens per micro-batch in `train`."""
    logprob_mb_tokens: int
    """Maximum tokens per micro-batch in log-probabilities."""
    algorithm: str
    """The packing algorithm, see `rl_batched_data.packing`."""


class DynamicBatchingConfig(TypedDict):
    """Micro-batches of padded rows, up to a token budget."""

    enabled: bool
    """Use dynamic batching."""
    train_mb_tokens: int
    """Maximum tokens per micro-batch in `train`, including padding."""
    logprob_mb_tokens: int
    """Maximum tokens per micro-batch in log-probabilities, including padding."""
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
    """Adam's beta1."""
    adam_beta2: float
    """Adam's beta2."""
    adam_eps: float
    """Adam's epsilon."""
    sgd_momentum: float
    """SGD's momentum."""
    use_distributed_optimizer: bool
    """Shard the optimizer state over data-parallel ranks."""
    use_precision_aware_optimizer: bool
    """Keep optimizer state in lower precision; not supported by `rl-megatron-worker`."""
    clip_grad: float
    """Maximum gradient norm."""


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
    """Number of `train` calls of the decay."""
    lr_warmup_iters: int
    """Number of `train` calls of the warmup."""
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
    """Megatron-FSDP's sharding strategy; read only with `use_custom_fsdp`."""


class MegatronConfig(TypedDict):
    """The Megatron-core backend."""

    enabled: bool
    """Use this backend."""
    empty_unused_memory_level: int
    """When to empty the CUDA cache. 0: never; 1: after each pass; 2: also after each step."""
    activation_checkpointing: bool
    """Recompute each layer's activations in the backward pass."""
    converter_type: str
    """Name in the converter registry; `auto`: by the model's architecture."""
    tensor_model_parallel_size: int
    """Ranks over which each layer's matrices are sharded."""
    pipeline_model_parallel_size: int
    """Pipeline stages."""
    num_layers_in_first_pipeline_stage: int | None
    """Layers of the first stage, if the stages are uneven."""
    num_layers_in_last_pipeline_stage: int | None
    """Layers of the last stage, if the stages are uneven."""
    context_parallel_size: int
    """Ranks over which each sequence is sharded."""
    pipeline_dtype: str
    """Dtype of the activations that stages exchange."""
    sequence_parallel: bool
    """Shard activations along the sequence between tensor-parallel regions."""
    virtual_pipeline_model_parallel_size: NotRequired[int | None]
    """Virtual stages per rank (interleaved 1F1B schedule)."""
    expert_model_parallel_size: NotRequired[int]
    """Ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: NotRequired[int | None]
    """Ranks that shard each expert's matrices; default: `tensor_model_parallel_size`."""
    recompute_granularity: NotRequired[str]
    """`full` layers, or `selective`: attention only. Read only with `activation_checkpointing`."""
    recompute_method: NotRequired[str]
    """With `full`: `uniform` or `block`."""
    recompute_num_layers: NotRequired[int]
    """With `full`: layers per checkpoint (`uniform`), or number of recomputed layers (`block`)."""
    moe_router_load_balancing_type: NotRequired[str]
    """Load balancing of experts: `none` or `aux_loss`."""
    moe_aux_loss_coeff: NotRequired[float]
    """Coefficient of `aux_loss`."""
    moe_token_dispatcher_type: NotRequired[str]
    """Token dispatch to experts: `alltoall` or `allgather`."""
    optimizer: NotRequired[MegatronOptimizerConfig]
    """The optimizer."""
    scheduler: NotRequired[MegatronSchedulerConfig]
    """The scheduler."""
    distributed_data_parallel_config: MegatronDDPConfig
    """Data parallelism."""


class TokenizerConfig(TypedDict):
    """The tokenizer."""

    name: str
    """Hugging Face name or directory; default: the model's."""
    chat_template: NotRequired[str | None]
    """A Jinja template that overrides the tokenizer's."""


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
    """A policy. Only `model_name` is required, and `optimizer` to train."""

    model_name: str
    """Hugging Face name or directory of the model."""
    head: NotRequired[str]
    """`language_model`, or a scalar head: `reward`, a score per row, or `value`, one per token."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    train_global_batch_size: int
    """Samples per optimizer step over all data-parallel ranks."""
    train_micro_batch_size: int
    """Samples per forward per rank in `train`."""
    learning_rate: float
    """The learning rate, if the optimizer's kwargs have no `lr`."""
    logprob_batch_size: int
    """Samples per forward per rank in log-probabilities."""
    generation: GenerationConfig | None
    """Sampling of completions. None: the policy does not generate."""
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
    """Sequences are padded to a multiple of this many tokens in the forward pass."""
    max_total_sequence_length: int
    """Maximum tokens per sequence, prompt and completion."""
    max_grad_norm: float | int | None
    """Maximum 2-norm of the gradients, enforced by scaling. None: no clipping."""
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
    """One scheduler, or several and one `{"milestones": [...]}`. Default: a constant rate."""
    seed: NotRequired[int]
    """Seed of sampling, dropout and adapter initialisation."""
    trust_remote_code: NotRequired[bool]
    """Run Python code from the checkpoint. Only for checkpoints that you trust."""
    timeout_s: NotRequired[float]
    """Limit of each wait of a rank for another, in seconds."""
    profile_dir: NotRequired[str]
    """Directory of the traces of `start_gpu_profiling` on the CPU."""
