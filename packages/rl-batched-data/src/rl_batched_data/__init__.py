"""A typed batch of tensors and lists: sharding, micro-batches and token log-probabilities."""

from rl_batched_data.batched_data_dict import BatchedDataDict, SlicedDataDict
from rl_batched_data.columns import PackedTensor, pad_right, round_up, verify_right_padding
from rl_batched_data.logprobs import (
    ScoringOptions,
    TokenScores,
    target_scores,
    token_logprobs,
    token_scores,
)
from rl_batched_data.packing.cost import SequenceCost
from rl_batched_data.packing.packed_sequences import PackedSequences
from rl_batched_data.packing.packers import SequencePacker, get_packer
from rl_batched_data.sharding import DynamicBatchingArgs, SequencePackingArgs

__all__ = [
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "PackedSequences",
    "PackedTensor",
    "ScoringOptions",
    "SequenceCost",
    "SequencePacker",
    "SequencePackingArgs",
    "SlicedDataDict",
    "TokenScores",
    "get_packer",
    "pad_right",
    "round_up",
    "target_scores",
    "token_logprobs",
    "token_scores",
    "verify_right_padding",
]
