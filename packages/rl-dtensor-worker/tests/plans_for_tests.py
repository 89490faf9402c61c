"""Plans that a user could have written."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

_LAYER = "model.layers.*"

ATTENTION = {
    f"{_LAYER}.self_attn.q_proj": "colwise",
    f"{_LAYER}.self_attn.k_proj": "colwise",
    f"{_LAYER}.self_attn.v_proj": "colwise",
    f"{_LAYER}.self_attn.o_proj": "rowwise",
}
NAMED = ATTENTION | {
    "model.embed_tokens": "embedding_rowwise",
    f"{_LAYER}.mlp.gate_proj": "colwise_gather_output",
    f"{_LAYER}.mlp.up_proj": "colwise_gather_output",
    f"{_LAYER}.mlp.down_proj": "rowwise_split_input",
}
GATHERED_QUERIES = {f"{_LAYER}.self_attn.q_proj": "colwise_gather_output"}
UNMATCHED = NAMED | {f"{_LAYER}.mlp.gate_porj": "colwise"}
MISNAMED = NAMED | {f"{_LAYER}.mlp.up_proj": "collwise"}


def torch_styles():
    """Return a plan of torch's own styles, as a function without arguments."""
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        **{f"{_LAYER}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{_LAYER}.self_attn.o_proj": RowwiseParallel(),
        f"{_LAYER}.mlp.gate_proj": ColwiseParallel(),
        f"{_LAYER}.mlp.up_proj": ColwiseParallel(),
        f"{_LAYER}.mlp.down_proj": RowwiseParallel(),
    }
