"""A typed batch of tensors and lists: sharding, micro-batches and token log-probabilities."""

from rl_batched_data.batched_data_dict import BatchedDataDict, SlicedDataDict
from rl_batched_data.packed_tensor import PackedTensor
from rl_batched_data.padding import pad_right, round_up, verify_right_padding
from rl_batched_data.token_logprobs import token_logprobs

__all__ = [
    "BatchedDataDict",
    "PackedTensor",
    "SlicedDataDict",
    "pad_right",
    "round_up",
    "token_logprobs",
    "verify_right_padding",
]
