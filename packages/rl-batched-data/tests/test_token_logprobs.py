import pytest
import torch
import torch.distributed as dist
from rl_batched_data import target_scores, token_logprobs, token_scores
from tolerances import STEP

# float32 against float64: four roundings of a logit of up to 20.
FLOAT32 = 4 * STEP * 20
# Gradients that are returned in bfloat16 are rounded to 8 bits.
BFLOAT16 = 2**-8

VOCAB, HIDDEN = 40, 12
MODEL = {"logit_scale": 0.6, "soft_cap": 5.0}


def example(dtype=torch.float32, vocab=VOCAB):
    """Return hidden states, matrix, bias, tokens on all edges of 1, 2 or 4 shards, and weights."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, HIDDEN, generator=draw).mul(1.5).to(dtype)
    matrix = torch.randn(vocab, HIDDEN, generator=draw).to(dtype)
    bias = torch.randn(vocab, generator=draw).to(dtype)
    tokens = torch.randint(0, vocab, (3, 7), generator=draw)
    edges = [0, vocab // 4 - 1, vocab // 4, vocab // 2 - 1, vocab // 2, vocab - 1]
    tokens[0, 1:] = torch.tensor(edges)
    return hidden, matrix, bias, tokens, torch.randn(2, 3, 7, generator=draw)


def dense(leaves, tokens, weights, *, temperature=1.0, logit_scale=1.0, soft_cap=None, top_k=0):
    """Return scores, entropies, top logits and tokens, and the gradients, all in float64."""
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].T + leaves[2]
    logits = logits * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    distribution = torch.log_softmax(logits / temperature, dim=-1)[:, :-1]
    chosen = distribution.gather(2, tokens[:, 1:, None]).squeeze(2)
    entropy = -(distribution.exp() * distribution).sum(2)
    first = torch.zeros(len(tokens), 1, dtype=torch.float64)
    scores, entropy = (torch.cat([first, values], dim=1) for values in (chosen, entropy))
    (scores * weights[0] + entropy * weights[1]).sum().backward()
    top = (logits / temperature)[:, :-1].topk(top_k, dim=2)
    return scores.detach(), entropy.detach(), top, [leaf.grad for leaf in leaves]


def scored(leaves, tokens, weights, **options):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    names = ("output_matrix", "output_bias")
    head = dict(zip(names, leaves[1:], strict=False))
    scores = token_scores(leaves[0], tokens, entropy=True, **head, **options)
    (scores.logprobs * weights[0] + scores.entropy * weights[1]).sum().backward()
    return scores, [leaf.grad for leaf in leaves]


def assert_close(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("from_hidden", [False, True])
@pytest.mark.parametrize("chunk_logits", [1, 70, 2**24])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 0.7, **MODEL}])
@pytest.mark.promise
def test_scores_and_gradients_equal_dense_float64(from_hidden, chunk_logits, options):
    hidden, matrix, bias, tokens, weights = example()
    leaves = [hidden, matrix, bias] if from_hidden else [hidden @ matrix.T + bias]
    expected, entropy, top, gradients = dense(leaves, tokens, weights, **options, top_k=5)
    scores, actual = scored(leaves, tokens, weights, **options, chunk_logits=chunk_logits, top_k=5)
    assert scores.logprobs.dtype == torch.float32
    assert (scores.logprobs[:, 0] == 0).all()
    assert_close(scores.logprobs, expected, FLOAT32)
    assert_close(scores.entropy, entropy, FLOAT32)
    assert_close(scores.top_k_logits[:, 1:], top.values, FLOAT32)
    assert torch.equal(scores.top_k_indices[:, 1:], top.indices)
    for gradient, reference in zip(actual, gradients, strict=True):
        assert_close(gradient, reference, FLOAT32 * max(1, reference.abs().max()))


@pytest.mark.parametrize("from_hidden", [False, True])
def test_bfloat16_is_accumulated_in_float32(from_hidden):
    hidden, matrix, bias, tokens, weights = example(torch.bfloat16, vocab=2000)
    leaves = [hidden, matrix, bias] if from_hidden else [hidden @ matrix.T + bias]
    expected, entropy, _, gradients = dense(leaves, tokens, weights)
    scores, actual = scored(leaves, tokens, weights, chunk_logits=300)
    assert scores.logprobs.dtype == torch.float32
    assert_close(scores.logprobs, expected, FLOAT32)
    assert_close(scores.entropy, entropy, FLOAT32)
    for gradient, reference in zip(actual, gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert_close(gradient, reference, BFLOAT16 * reference.abs().max())


def equals_dense_over_ranks(world_size, rank):
    for from_hidden in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            check_part_of_rank(world_size, from_hidden, dtype, rank)


def check_part_of_rank(world_size, from_hidden, dtype, rank):
    hidden, matrix, bias, tokens, weights = example(dtype)
    leaves = [hidden, matrix, bias] if from_hidden else [hidden @ matrix.T + bias]
    options = {"temperature": 0.7, **MODEL}
    expected, entropy, top, gradients = dense(leaves, tokens, weights, **options, top_k=15)

    def own(index, tensor):
        vocab_axis = -1 if not from_hidden else 0
        sharded = index > 0 or not from_hidden
        return tensor.chunk(world_size, dim=vocab_axis)[rank] if sharded else tensor

    shards = [own(index, leaf) for index, leaf in enumerate(leaves)]
    scores, actual = scored(
        shards, tokens, weights, **options, chunk_logits=30, tp_group=dist.group.WORLD, top_k=15
    )
    assert_close(scores.logprobs, expected, FLOAT32)
    assert_close(scores.entropy, entropy, FLOAT32)
    assert_close(scores.top_k_logits[:, 1:], top.values, FLOAT32)
    assert torch.equal(scores.top_k_indices[:, 1:], top.indices) or dtype == torch.bfloat16
    relative = FLOAT32 if dtype == torch.float32 else BFLOAT16
    for index, (gradient, reference) in enumerate(zip(actual, gradients, strict=True)):
        tolerance = relative * max(1, reference.abs().max())
        assert_close(gradient, own(index, reference), tolerance)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_vocabulary_over_ranks_equals_dense_float64(on_gloo_ranks, world_size):
    on_gloo_ranks(world_size, equals_dense_over_ranks, world_size)


def uneven_parts_need_their_start(rank):
    hidden, matrix, bias, tokens, _ = example()
    logits = hidden @ matrix.T + bias
    start, end = [(0, 27), (27, VOCAB)][rank]
    scores = token_logprobs(
        logits[..., start:end], tokens, tp_group=dist.group.WORLD, vocab_start=start
    )
    assert_close(scores, token_logprobs(logits, tokens).double(), FLOAT32)


def test_ranks_may_hold_parts_of_different_sizes(on_gloo_ranks):
    on_gloo_ranks(2, uneven_parts_need_their_start)


def test_aligned_targets_are_scored_where_they_stand():
    hidden, matrix, bias, tokens, _ = example()
    logits = hidden @ matrix.T + bias
    aligned = target_scores(logits[:, :-1], tokens[:, 1:])
    assert torch.equal(aligned.logprobs, token_logprobs(logits, tokens)[:, 1:])
    flat = target_scores(logits[0, :-1], tokens[0, 1:])
    assert torch.equal(flat.logprobs, aligned.logprobs[0])


@pytest.mark.parametrize("from_hidden", [False, True])
def test_neither_pass_writes_into_its_inputs(from_hidden):
    hidden, matrix, bias, tokens, weights = example()
    leaves = [hidden, matrix, bias] if from_hidden else [hidden @ matrix.T + bias]
    before = [leaf.clone() for leaf in leaves]
    scored(leaves, tokens, weights, temperature=0.7)
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, before, strict=True))


def test_only_the_gradients_that_are_needed_are_computed():
    hidden, matrix, _, tokens, _ = example()
    for needs in ((True, False), (False, True)):
        leaves = [
            leaf.detach().requires_grad_(need)
            for leaf, need in zip((hidden, matrix), needs, strict=True)
        ]
        token_logprobs(leaves[0], tokens, output_matrix=leaves[1]).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == list(needs)


def test_autocast_does_not_lower_the_precision():
    hidden, matrix, _, tokens, _ = example()
    plain = token_logprobs(hidden, tokens, output_matrix=matrix)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(token_logprobs(hidden, tokens, output_matrix=matrix), plain)


def test_tokens_that_are_ruled_out_have_no_part_in_the_distribution():
    out = -torch.inf
    logits = torch.tensor([[[out, 0.0, out, 1.0, out], [0.0] * 5]])
    tokens = torch.tensor([[0, 3]])
    for chunk_logits in (1, 2**24):
        leaf = logits.clone().requires_grad_()
        scores = token_scores(leaf, tokens, entropy=True, chunk_logits=chunk_logits)
        pair = torch.tensor([0.0, 1.0]).log_softmax(0)
        assert scores.logprobs[0, 1].item() == pytest.approx(pair[1].item())
        entropy = -(pair.exp() * pair).sum()
        assert scores.entropy[0, 1].item() == pytest.approx(entropy.item())
        (scores.logprobs + scores.entropy).sum().backward()
        assert torch.isfinite(leaf.grad).all()
        assert torch.equal(leaf.grad[0, 0, ::2], torch.zeros(3))


def test_a_token_outside_the_vocabulary_scores_nan():
    hidden, matrix, _, tokens, _ = example()
    tokens[1, 3] = VOCAB
    scores = token_logprobs(hidden, tokens, output_matrix=matrix)
    assert scores.isnan().nonzero().tolist() == [[1, 3]]


def test_a_batch_without_rows_has_scores_without_rows():
    scores = token_logprobs(torch.zeros(0, 7, VOCAB), torch.zeros(0, 7, dtype=torch.int64))
    assert scores.shape == (0, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be greater than 0"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0 must be greater than 0"),
        ({"chunk_logits": 0}, "chunk_logits=0 must be at least 1"),
        ({"top_k": 41}, "top_k=41 is not within 0..40"),
        ({"tokens": torch.zeros(3, 6)}, r"inputs \[3, 7, 12\] and tokens \[3, 6\] do not match"),
        ({"tokens": torch.zeros(3)}, r"tokens have shape \[3\], expected \[batch, seq\]"),
        ({"output_matrix": torch.zeros(40, 11)}, r"float32 \[3, 7, 12\] and output_matrix.*40, 11"),
        ({"output_matrix": torch.zeros(40, 12).half()}, "output_matrix torch.float16"),
        ({"output_bias": torch.zeros(39)}, r"output_bias \[39\] and output_matrix \[40, 12\]"),
        ({"output_matrix": None, "output_bias": torch.zeros(40)}, "without output_matrix"),
    ],
)
def test_wrong_arguments_are_named_with_their_numbers(changes, message):
    hidden, matrix, _, tokens, _ = example()
    with pytest.raises(ValueError, match=message):
        token_scores(**{"inputs": hidden, "tokens": tokens, "output_matrix": matrix, **changes})
