"""The backward pass goes on with what the forward pass has made of its last tile."""

import pytest
import test_token_logprobs as cases
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from rl_batched_data import token_logprobs
from torch.utils._python_dispatch import TorchDispatchMode

OPTIONS = {"temperature": 0.7, "logit_scale": 0.6}


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = ("aten::mm", "aten::addmm", "aten::addmm_")
        self.count += function.name().partition(".")[0] in names
        return function(*args, **(kwargs or {}))


def leaves_of(dtype=torch.float32, vocab=cases.VOCAB):
    hidden, matrix, bias, tokens, weights = cases.example(dtype, vocab)
    return [hidden, matrix, bias], tokens, torch.stack([weights[0], torch.zeros_like(weights[0])])


def score(leaves, tokens, **options):
    hidden, matrix, bias = leaves
    return token_logprobs(hidden, tokens, output_matrix=matrix, output_bias=bias, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, OPTIONS, {"chunk_logits": 300}])
def test_gradients_equal_dense_float64(dtype, options):
    leaves, tokens, weights = leaves_of(dtype)
    dense = {name: value for name, value in options.items() if name != "chunk_logits"}
    expected, _, _, gradients = cases.dense(leaves, tokens, weights, **dense)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    scores = score(leaves, tokens, **options)
    cases.assert_close(scores.detach(), expected, cases.FLOAT32)
    loss = (scores * weights[0]).sum()
    for _ in range(2):  # the second pass over the graph has nothing left that is kept
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        relative = cases.FLOAT32 if dtype == torch.float32 else cases.BFLOAT16
        for gradient, reference in zip(found, gradients, strict=True):
            cases.assert_close(gradient, reference, relative * max(1, reference.abs().max()))


def equals_dense_over_two_ranks(rank):
    leaves, tokens, weights = leaves_of()
    # The second rank's logits are far below the first's.
    leaves[2][cases.VOCAB // 2 :] -= 30
    _, _, _, gradients = cases.dense(leaves, tokens, weights, **OPTIONS)
    hidden, *parts = [leaves[0], *(leaf.chunk(2)[rank].clone() for leaf in leaves[1:])]
    own = [leaf.requires_grad_() for leaf in (hidden, *parts)]
    scores = score(own, tokens, **OPTIONS, tp_group=dist.group.WORLD)
    (scores * weights[0]).sum().backward()
    for leaf, reference in zip(own, gradients, strict=True):
        expected = reference if leaf is hidden else reference.chunk(2)[rank]
        cases.assert_close(leaf.grad, expected, cases.FLOAT32 * max(1, reference.abs().max()))


def test_a_vocabulary_over_ranks_equals_dense_float64(on_gloo_ranks):
    on_gloo_ranks(2, equals_dense_over_two_ranks)


@pytest.mark.parametrize(("chunk_logits", "num_tiles"), [(2**24, 1), (420, 4), (210, 6)])
def test_the_product_of_the_last_tile_is_made_once(chunk_logits, num_tiles):
    leaves, tokens, _ = leaves_of()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with Products() as products:
        score(leaves, tokens, chunk_logits=chunk_logits).sum().backward()
    # Of each tile one forward, one for the gradient of each factor, and but once one made again.
    assert products.count == 4 * num_tiles - 1


def test_no_positions_have_no_tile():
    leaves, tokens, _ = leaves_of()
    leaves = [leaves[0][:0].requires_grad_(), *leaves[1:]]
    score(leaves, tokens[:0]).sum().backward()
    assert leaves[0].grad.shape == leaves[0].shape


def test_no_more_than_the_tile_is_held():
    hidden, matrix = torch.randn(2, 512, 16, device="meta"), torch.randn(4096, 16, device="meta")
    tokens = torch.zeros(2, 512, dtype=torch.int64, device="meta")
    leaves = [hidden.requires_grad_(), matrix.requires_grad_()]
    with LiveBytes(*leaves, tokens) as counter:
        token_logprobs(hidden, tokens, output_matrix=matrix).sum().backward()
    tile = 2 * 512 * 4096 * 4
    assert tile < counter.peak - sum(leaf.grad.nbytes for leaf in leaves) < 1.1 * tile
