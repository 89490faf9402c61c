"""The configuration of a policy: TypedDicts of the plain dicts that are read from YAML.

Every key may be missing or None, which both mean "not set". `rl_interfaces.config.resolve` has the
defaults and rejects unknown keys and wrong types.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from rl_interfaces.config.schema import (
    Count,
    Fraction,
    Index,
    NotEmpty,
    NotNegative,
    Positive,
    Seconds,
    Seed,
    Text,
)
from rl_interfaces.generation import GenerationConfig

ResolvedConfig: TypeAlias = "dict[str, Any]"
"""A `PolicyConfig` after `resolve_policy_config`, or a section of it: keys and types are checked,
defaults filled in and unset keys left out. Sections of third-party backends have keys of their own,
so that this is no TypedDict."""

Layers = Annotated[str | list[str], NotEmpty()]
"""Names of layers, or an expression for them."""

SchedulerMilestones = dict[str, list[Count]]
"""`{"milestones": [n, ...]}`: the `train` calls at which the next scheduler of the list starts."""


class LoraConfig(TypedDict):
    """Low-rank adapters, trained instead of the model's weights; the keys are peft's."""

    enabled: bool
    """Train adapters and freeze the model's weights."""
    r: NotRequired[Count]
    """Rank of each adapter."""
    lora_alpha: NotRequired[Positive]
    """An adapter's product is scaled by `lora_alpha / r`."""
    lora_dropout: NotRequired[Fraction]
    """Dropout probability of an adapter's inputs, in train mode only."""
    target_modules: NotRequired[Layers]
    """Linear layers: a list of name suffixes, a regular expression of full names, or `all-linear`:
    all but the output layer, and what peft does not adapt as a linear layer, such as experts."""
    adapter_path: NotRequired[Text]
    """A directory in peft's format with initial adapters; their `r` and `lora_alpha` must match.
    The reference is the model with these adapters; without them, the model alone."""


class DTensorConfig(TypedDict):
    """The FSDP2 and DTensor backend."""

    enabled: bool
    """Use this backend."""
    cpu_offload: bool
    """Offload parameters, gradients and optimizer state to the CPU between uses (FSDP2)."""
    sequence_parallel: bool
    """Shard activations along the sequence between tensor-parallel regions; nothing on one rank."""
    activation_checkpointing: bool
    """Recompute each layer's activations in the backward pass."""
    tensor_parallel_size: Count
    """Ranks over which each layer's matrices are sharded."""
    context_parallel_size: Count
    """Ranks over which each sequence is sharded."""
    custom_parallel_plan: Text | None
    """Dotted path to a tensor-parallel plan: a dict, or a function that returns one."""
    attn_implementation: NotRequired[str]
    """Attention of transformers: `sdpa`, `eager`, `flex_attention`, `flash_attention_2` or another
    name that it knows. Not set: transformers' choice for the model."""
    model_dropout: NotRequired[bool]
    """Train with the dropout of the model's config; otherwise it is off, as it is in scoring."""
    share_prefixes: NotRequired[bool]
    """Compute the common start of neighbouring rows once, as the prompt of a group's samples:
    the same log-probabilities and gradients, in less time and memory."""
    fused_head: NotRequired[bool]
    """Have Liger compute the log-probabilities of `get_logprobs` and `train`, which needs the extra
    `liger` and a plain output layer; a kernel on some GPUs, tiles as without it elsewhere."""
    async_checkpoint: NotRequired[bool]
    """Copy a checkpoint to the CPU and write it in the background."""
    data_parallel_replicate_size: NotRequired[Count | Literal["auto"]]
    """Replicas of the sharded model; more than 1 is hybrid sharding (HSDP). `auto`: a model with a
    training state of at most 256 MiB is replicated on every data-parallel rank, a larger one is
    sharded over all of them."""
    lora: NotRequired[LoraConfig]
    """Train low-rank adapters."""
    env_vars: NotRequired[dict[str, str]]
    """Environment variables of each rank's process, set before it uses its device, such as
    `PYTORCH_CUDA_ALLOC_CONF`; not those of the launcher, nor `OMP_NUM_THREADS`."""


class SequencePackingConfig(TypedDict):
    """Micro-batches of packed sequences, without padding."""

    enabled: bool
    """Use sequence packing."""
    train_mb_tokens: Count
    """Maximum tokens per micro-batch in `train`."""
    logprob_mb_tokens: Count
    """Maximum tokens per micro-batch in log-probabilities."""
    algorithm: str
    """The packing algorithm, see `rl_batched_data.packing`."""
    sequence_length_round: NotRequired[Count]
    """Packed micro-batches are padded to a multiple of this many tokens, for fewer shapes; they may
    exceed their maximum by less than it."""


class DynamicBatchingConfig(TypedDict):
    """Micro-batches of padded rows, up to a token budget."""

    enabled: bool
    """Use dynamic batching."""
    train_mb_tokens: Count
    """Maximum tokens per micro-batch in `train`, including padding."""
    logprob_mb_tokens: Count
    """Maximum tokens per micro-batch in log-probabilities, including padding."""
    sequence_length_round: Count
    """Micro-batch widths are multiples of this many tokens."""


class MegatronOptimizerConfig(TypedDict):
    """Megatron-core's optimizer; the keys are its own."""

    optimizer: str
    """`adam` or `sgd`."""
    lr: NotNegative
    """Learning rate."""
    min_lr: NotNegative
    """Learning rate at the end of the decay."""
    weight_decay: NotNegative
    """Weight decay, not applied to one-dimensional parameters."""
    bf16: bool
    """`policy.precision` is `bfloat16`. True beside another precision is refused; False says
    nothing, as in NeMo RL, where the model takes its dtype from `policy.precision` alone."""
    fp16: bool
    """The same of `float16`."""
    params_dtype: str
    """Dtype of the parameters: `policy.precision`, or `float32`, which the optimizer's copy has."""
    adam_beta1: Fraction
    """Adam's beta1."""
    adam_beta2: Fraction
    """Adam's beta2."""
    adam_eps: Positive
    """Adam's epsilon."""
    sgd_momentum: Fraction
    """SGD's momentum."""
    use_distributed_optimizer: bool
    """Shard the optimizer state over data-parallel ranks."""
    use_precision_aware_optimizer: bool
    """Keep the float32 weights inside the optimizer; `rl-megatron-worker` takes the same update
    with the distributed optimizer's."""
    clip_grad: NotNegative
    """Maximum gradient norm."""


class MegatronSchedulerConfig(TypedDict):
    """Megatron-core's parameter scheduler; the keys are its own."""

    start_weight_decay: NotNegative
    """Weight decay at the first step."""
    end_weight_decay: NotNegative
    """Weight decay at the last step."""
    weight_decay_incr_style: str
    """`constant`, `linear` or `cosine`."""
    lr_decay_style: str
    """`constant`, `linear`, `cosine` or `inverse-square-root`."""
    lr_decay_iters: Count | None
    """Number of `train` calls of the decay."""
    lr_warmup_iters: Index
    """Number of `train` calls of the warmup."""
    lr_warmup_init: NotNegative
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
    """Average in the collective instead of before it; without effect where gradients are sums, as
    in `rl-megatron-worker`."""
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
    """Name in the converter registry; `auto`: by the model's architecture. Or that of a class in
    transformers, as `Qwen2ForCausalLM`, for a model that has no converter of its own."""
    tensor_model_parallel_size: Count
    """Ranks over which each layer's matrices are sharded."""
    pipeline_model_parallel_size: Count
    """Pipeline stages."""
    num_layers_in_first_pipeline_stage: Count | None
    """Layers of the first stage, if the stages are uneven."""
    num_layers_in_last_pipeline_stage: Count | None
    """Layers of the last stage, if the stages are uneven."""
    context_parallel_size: Count
    """Ranks over which each sequence is sharded."""
    pipeline_dtype: str
    """Dtype of the activations that stages exchange."""
    sequence_parallel: bool
    """Shard activations along the sequence between tensor-parallel regions; nothing on one rank."""
    virtual_pipeline_model_parallel_size: NotRequired[Count | None]
    """Virtual stages per rank (interleaved 1F1B schedule)."""
    expert_model_parallel_size: NotRequired[Count]
    """Ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: NotRequired[Count | None]
    """Ranks that shard each expert's matrices; default: `tensor_model_parallel_size`."""
    recompute_granularity: NotRequired[str]
    """`full` layers, or `selective`: attention only. Read only with `activation_checkpointing`."""
    recompute_method: NotRequired[str]
    """With `full`: `uniform` or `block`."""
    recompute_num_layers: NotRequired[Count]
    """With `full`: layers per checkpoint (`uniform`), or number of recomputed layers (`block`)."""
    moe_router_load_balancing_type: NotRequired[str]
    """Load balancing of experts: `none` or `aux_loss`."""
    moe_aux_loss_coeff: NotRequired[NotNegative]
    """Coefficient of `aux_loss`."""
    moe_router_dtype: NotRequired[str]
    """Dtype in which routers of experts compute: `fp32` or `fp64`. Not set: Megatron-core's choice
    for the model."""
    moe_router_bias_update_rate: NotRequired[NotNegative]
    """Change per step of the biases that balance experts. They stay those of the model, so that one
    that has them takes 0 only; others have none to change."""
    moe_token_dispatcher_type: NotRequired[str]
    """Token dispatch to experts: `alltoall` or `allgather`."""
    freeze_moe_router: NotRequired[bool]
    """Leave the routers of experts as they are in the model."""
    moe_router_replay: NotRequired[bool]
    """Route each token in `train` to the experts that it took in `get_logprobs`, which returns them
    as `routed_experts`, or in the sampler."""
    apply_rope_fusion: NotRequired[bool]
    """Rotate queries and keys by Transformer Engine's fused kernel, where its layers are used."""
    env_vars: NotRequired[dict[str, str]]
    """Environment variables of each rank's process, set before it uses its device, such as
    `PYTORCH_CUDA_ALLOC_CONF`; not those of the launcher, nor `OMP_NUM_THREADS`."""
    optimizer: NotRequired[MegatronOptimizerConfig]
    """The optimizer."""
    scheduler: NotRequired[MegatronSchedulerConfig]
    """The scheduler."""
    distributed_data_parallel_config: MegatronDDPConfig
    """Data parallelism."""


class TokenizerConfig(TypedDict):
    """The tokenizer."""

    name: Text
    """Hugging Face name or directory; default: the model's."""
    chat_template: NotRequired[str | None]
    """A Jinja template that overrides the tokenizer's."""


class PytorchOptimizerConfig(TypedDict):
    """An optimizer by dotted name."""

    name: Text
    """For example `torch.optim.AdamW`."""
    kwargs: dict[str, object]
    """Its keyword arguments."""


class SinglePytorchSchedulerConfig(TypedDict):
    """A learning-rate scheduler by dotted name; it steps once per `train` call."""

    name: Text
    """For example `torch.optim.lr_scheduler.LinearLR`."""
    kwargs: dict[str, object]
    """Its keyword arguments."""


class PolicyConfig(TypedDict):
    """A policy. Only `model_name` is required, and `optimizer` to train."""

    model_name: Text
    """Hugging Face name or directory of the model."""
    head: NotRequired[str]
    """`language_model`, or a scalar head: `reward`, a score per row, or `value`, one per token."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    train_global_batch_size: Count
    """Samples per optimizer step over all data-parallel ranks."""
    train_micro_batch_size: Count
    """Samples per forward per rank in `train`."""
    learning_rate: NotNegative
    """The learning rate, if the optimizer's kwargs have no `lr`."""
    logprob_batch_size: Count
    """Samples per forward per rank in log-probabilities."""
    generation: GenerationConfig | None
    """Sampling of completions. None: the policy does not generate."""
    generation_batch_size: NotRequired[Count]
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
    make_sequence_length_divisible_by: Count
    """Sequences are padded to a multiple of this many tokens in the forward pass."""
    max_total_sequence_length: Count
    """Maximum tokens per sequence, prompt and completion."""
    max_grad_norm: Positive | None
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
    seed: NotRequired[Seed]
    """Seed of sampling, dropout and adapter initialisation."""
    trust_remote_code: NotRequired[bool]
    """Run Python code from the checkpoint. Only for checkpoints that you trust."""
    timeout_s: NotRequired[Seconds]
    """Limit of each wait of a rank for another, in seconds."""
    profile_dir: NotRequired[Text]
    """Directory of the traces of `start_gpu_profiling` on the CPU."""
