"""Scores from hidden states, against the log-softmax of the models' own logits."""

import logging

import pytest
import scoring_ranks
import torch
import training_ranks
from head_models import FAMILIES, build
from oracle import (
    gradients_of,
    largest_difference,
    plain_gradients,
    plain_logprobs,
    plain_training,
)
from rl_batched_data import PackedSequences, SlicedDataDict
from rl_dtensor_worker.forward import Forward, find_token_head
from rl_interfaces.backend.steps import MicroBatch
from tiny_model import make_batch, make_config
from tolerances import assert_all_close, assert_close
from torch.utils._python_dispatch import TorchDispatchMode

TEMPERATURE = 0.7


def make_micro_batch(layout, batch):
    rows = SlicedDataDict(dict(batch))
    packed = None
    if layout == "packed":
        packed = PackedSequences.of(rows["input_lengths"], rows["input_ids"].shape[1])
    width = 16 if layout == "dynamic" else None
    return MicroBatch(span=(0, rows.size), rows=rows, packed=packed, width=width)


def forward_of(model):
    head = find_token_head(model)
    return Forward(model=model, head=head, width_multiple=4)


@pytest.mark.slow_beyond(4, every=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_the_models_own_logits(name):
    batch = make_batch(4)
    expected = plain_logprobs(build(name), batch, temperature=TEMPERATURE)
    expected_gradients = plain_gradients(build(name), batch, temperature=TEMPERATURE)
    for layout in ("padded", "dynamic", "packed"):
        model = build(name)
        if layout == "dynamic":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        forward = forward_of(model)
        assert (forward.head.layer is None) == (name == "unknown")
        scores = forward.logprobs(make_micro_batch(layout, batch), temperature=TEMPERATURE)
        assert_close(scores.detach(), expected)
        scores.sum().backward()
        assert_all_close(gradients_of(model), expected_gradients)


def test_what_a_config_tells_is_found():
    found = {name: find_token_head(build(name)) for name in FAMILIES}
    assert found["gemma3, soft cap"].soft_cap == 2.0
    assert found["cohere, scale"].logit_scale == 0.25
    assert found["granite, scale"].logit_scale == 0.25
    assert found["llama"].logit_scale == 1.0
    assert found["llama"].soft_cap is None


def test_a_model_that_takes_its_own_head_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        find_token_head(build("unknown"))
    assert "ShiftingLlama computes all logits" in caplog.text
    caplog.clear()
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model = build("llama")
    model.set_output_embeddings(layer)
    assert find_token_head(model).layer is None
    assert "its output layer is a Sequential" in caplog.text


def test_the_layer_is_itself_again_afterwards_even_after_an_error():
    model = build("llama")
    batch = make_batch(2)
    expected = model(batch["input_ids"]).logits
    forward = forward_of(model)
    forward.logprobs(make_micro_batch("padded", batch), temperature=TEMPERATURE)
    assert torch.equal(model(batch["input_ids"]).logits, expected)
    broken = {"input_ids": torch.full((1, 3), 99), "input_lengths": torch.tensor([3])}
    with pytest.raises(IndexError):
        forward.logprobs(make_micro_batch("padded", broken), temperature=TEMPERATURE)
    assert torch.equal(model(batch["input_ids"]).logits, expected)


class _LargestResult(TorchDispatchMode):
    """Remembers the largest floating-point tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.numel = max(self.numel, value.numel())
        return result


def test_no_pass_holds_all_logits(monkeypatch):
    vocab_size, num_rows, width = 8192, 4, 1024
    sizes = {"vocab_size": vocab_size, "hidden_size": 16, "max_position_embeddings": width}
    model_class, config_class, options = FAMILIES["llama"]
    monkeypatch.setitem(FAMILIES, "llama", (model_class, config_class, options | sizes))
    model = build("llama")
    batch = make_batch(num_rows, width=width)
    batch["input_lengths"][0] = width
    forward = forward_of(model)
    with _LargestResult() as largest:
        forward.logprobs(
            make_micro_batch("padded", batch), temperature=TEMPERATURE
        ).sum().backward()
    assert largest.numel < num_rows * width * vocab_size


def test_the_backward_pass_gathers_the_output_matrix_again(pools, tmp_path):
    # FSDP learns from the forward's output that a backward pass will come.
    build("llama").save_pretrained(tmp_path)
    plain, interrupted = (
        pools(2).run(
            training_ranks.gradients_around_a_call,
            config=make_config(str(tmp_path)),
            batch=make_batch(4),
            interrupt=interrupt,
        )[0]
        for interrupt in (False, True)
    )
    assert largest_difference(interrupted, plain) == 0


@pytest.mark.parametrize("name", ["gemma3, soft cap", "cohere, scale", "phi, bias"])
def test_sharded_models_score_as_plain_ones(pools, tmp_path, name):
    build(name).save_pretrained(tmp_path)
    batch = make_batch(6)
    generation = {"max_new_tokens": 8, "temperature": TEMPERATURE}
    parts = pools(2).run(
        scoring_ranks.score,
        config=make_config(str(tmp_path), generation=generation),
        batch=batch,
    )
    expected = plain_logprobs(build(name), batch, temperature=TEMPERATURE)
    assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("name", ["gemma3, soft cap", "cohere, scale", "phi, bias"])
def test_sharded_models_train_as_plain_ones(pools, tmp_path, name):
    build(name).save_pretrained(tmp_path)
    batch = make_batch(4)
    parameters, losses, _ = plain_training(
        str(tmp_path), batch, global_batch_size=4, num_calls=2, temperature=TEMPERATURE
    )
    generation = {"max_new_tokens": 8, "temperature": TEMPERATURE}
    trained, *_ = pools(2).run(
        training_ranks.train,
        config=make_config(str(tmp_path), generation=generation),
        batch=batch,
        num_calls=2,
        mbs=1,
    )
    assert_all_close(trained.parameters, parameters)
    assert_close(trained.losses, losses, "losses")
