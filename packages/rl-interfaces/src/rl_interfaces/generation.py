"""Generation: configuration, inputs and outputs of a generation backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NotRequired

from typing_extensions import TypedDict

from rl_interfaces.config.schema import Count, Index, Probability, Temperature, Text

if TYPE_CHECKING:
    import torch
    from rl_batched_data import BatchedDataDict


class ColocationResources(TypedDict):
    """The devices of a generation engine that is not colocated with the trainer."""

    gpus_per_node: Count | None
    """Devices per node."""
    num_nodes: Count | None
    """Nodes."""


class ColocationConfig(TypedDict):
    """Whether generation shares the trainer's devices."""

    enabled: bool
    """True: trainer and engine take turns on the same devices."""
    resources: NotRequired[ColocationResources]
    """The engine's own devices, read when `enabled` is false."""


class GenerationConfig(TypedDict):
    """How completions are sampled."""

    backend: Text
    """`hf`: the training worker's own sampler. Other names are engines of `rl-policy`'s extras."""
    max_new_tokens: Count
    """Maximum generated tokens per row."""
    temperature: Temperature
    """Divides the logits, here and in every log-probability of the policy. 0 is greedy decoding."""
    top_p: Probability
    """Keep the smallest set of tokens whose probability reaches this. 1.0 keeps all."""
    top_k: Count | None
    """Keep the k most likely tokens. None keeps all."""
    model_name: NotRequired[Text]
    """The engine's model; the policy's own when absent."""
    stop_token_ids: list[Index] | None
    """Tokens that end a row. They are part of the output."""
    stop_strings: list[Text] | None
    """Strings that end a row. They are part of the output."""
    pad_token_id: NotRequired[Index]
    """Padding of `output_ids`; the tokenizer's pad token when absent."""
    colocated: NotRequired[ColocationConfig]
    """Whether generation shares the trainer's devices."""
    vllm_cfg: NotRequired[dict[str, object]]
    """Options of the vLLM engine."""


class SamplingOptions(TypedDict):
    """The sampling parameters of one call, in place of those of `policy.generation`."""

    max_new_tokens: int
    """Maximum generated tokens per row."""
    temperature: float
    """Divides the logits. 0 is greedy decoding."""
    top_p: float
    """Keep the smallest set of tokens whose probability reaches this. 1.0 keeps all."""
    top_k: int | None
    """Keep the k most likely tokens. None keeps all."""
    stop_token_ids: list[int]
    """Tokens that end a row. They are part of the output."""
    stop_strings: list[str]
    """Strings that end a row. They are part of the output."""
    stops_at_end: bool
    """Whether the tokenizer's end token ends a row, too."""
    seed: int | None
    """Of the call's random numbers; None: they continue those of the calls before."""


class GenerationDatumSpec(TypedDict):
    """The input of `generate`.

    Example, two prompts of 3 and 2 tokens, pad id 0:
        input_ids     = [[11, 12, 13], [21, 22, 0]]   int64 [2, 3], right-padded
        input_lengths = [3, 2]                        int64 [2], tokens
        stop_strings  = [["END"], None]               optional, a list of texts per row
    """

    input_ids: torch.Tensor
    """`[batch, seq]` int64, right-padded."""
    input_lengths: torch.Tensor
    """`[batch]` int64, tokens per row."""
    stop_strings: NotRequired[list[list[str] | None]]
    """`[batch]` strings that end a row, in addition to the configured ones."""


ROUTER_CHOOSES = -1
"""In place of an expert in `routed_experts`: the router chooses for this token."""


class GenerationOutputSpec(TypedDict):
    """The output of `generate`.

    Example, the two prompts above with completions of 2 and 1 tokens:
        output_ids                = [[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]]   int64 [2, 5]
        generation_lengths        = [2, 1]                                       int64 [2]
        unpadded_sequence_lengths = [5, 3]                                       int64 [2]
        logprobs                  = [[0, 0, 0, -0.1, -0.7], [0, 0, -0.3, 0, 0]]  float32 [2, 5]
    """

    output_ids: torch.Tensor
    """`[batch, seq]` int64: prompt, then completion, then padding."""
    generation_lengths: torch.Tensor
    """`[batch]` int64, generated tokens."""
    unpadded_sequence_lengths: torch.Tensor
    """`[batch]` int64, prompt and generated tokens."""
    logprobs: torch.Tensor
    """`[batch, seq]` float32: of each generated token, under the distribution it was sampled from
    (temperature and truncation applied); 0 elsewhere."""
    weight_version: NotRequired[torch.Tensor]
    """`[batch]` int64: the version of the weights that sampled the row's oldest token."""
    weight_versions: NotRequired[torch.Tensor]
    """`[batch, seq]` int64: the version that sampled each token; `NOT_SAMPLED` elsewhere."""
    routed_experts: NotRequired[torch.Tensor]
    """`[batch, seq, layers, experts per token]` int16: the experts that each token took, of all
    layers, or of those with experts alone; `ROUTER_CHOOSES` for the last token of a row, which the
    model has not taken, and in padding. What a layer without experts has says nothing. For
    `get_logprobs` and `train` of a policy with router replay."""


class GenerationInterface(ABC):
    """A generation backend."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Return a completion per row, in the caller's order.

        Args:
            data: The prompts, see `GenerationDatumSpec`.
            greedy: Take the most likely token every time, regardless of the configuration.
        """

    @abstractmethod
    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Load everything that generation needs onto the device; True on success."""

    @abstractmethod
    def finish_generation(self, *args: object, **kwargs: object) -> bool:
        """Free the memory that only generation needs; True on success."""
