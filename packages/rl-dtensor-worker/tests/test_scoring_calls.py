"""The largest logits, and the scores of reward and value models, against plain transformers."""

from functools import partial

import pytest
import scoring_ranks
import torch
import training_ranks
from oracle import assert_trained_like, load
from tiny_model import build_tiny_model, make_batch, make_config
from tolerances import LOGPROBS, assert_close, expected_of, measured_training
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

SECTIONS = (None, "dynamic_batching", "sequence_packing")
PLAIN = {
    "reward": (Qwen2ForSequenceClassification, AutoModelForSequenceClassification),
    "value": (Qwen2ForTokenClassification, AutoModelForTokenClassification),
}


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """A reward model and a value model, on disk, without a padding token."""
    paths = {}
    for head, (model_class, _) in PLAIN.items():
        base = tmp_path_factory.mktemp(f"{head}-base")
        path = tmp_path_factory.mktemp(head)
        build_tiny_model(base)
        config = Qwen2Config.from_pretrained(base, num_labels=1, pad_token_id=None)
        torch.manual_seed(1)
        model = model_class(config)
        torch.nn.init.normal_(model.score.weight, std=0.2)
        model.save_pretrained(path)
        paths[head] = str(path)
    return paths


def config_for(model, section, **overrides):
    budgets = {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}
    sections = {} if section is None else {section: budgets}
    return make_config(model, **sections, **overrides)


def gathered(parts):
    """Return the rows of all ranks in the batch's order."""
    place = torch.tensor(parts[0].order).argsort()
    return {key: torch.cat([part.output[key] for part in parts])[place] for key in parts[0].output}


def plain_values(path, head, batch):
    """Return each token's score, row by row without any padding."""

    def compute(model):
        values = torch.zeros(batch["input_ids"].shape, dtype=model.dtype)
        for row, length in enumerate(batch["input_lengths"].tolist()):
            with torch.no_grad():
                hidden = model.model(batch["input_ids"][row : row + 1, :length]).last_hidden_state
                values[row, :length] = model.score(hidden)[0, :, 0]
        return values

    model = PLAIN[head][1].from_pretrained(path, dtype=torch.float32).eval()
    return expected_of(compute, model, LOGPROBS)


@pytest.mark.slow_beyond(3, every=5)
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_topk_logits_are_those_of_plain_transformers(
    pools, tiny_model, section, num_ranks, num_rows
):
    batch = make_batch(num_rows)
    generation = {"max_new_tokens": 8, "temperature": 0.7}
    parts = pools(num_ranks).run(
        scoring_ranks.call_planned,
        config=config_for(tiny_model, section, generation=generation),
        batch=batch,
        section=section,
        method="get_topk_logits",
        k=3,
    )
    found = gathered(parts)
    assert found["topk_logits"].dtype is torch.float32
    assert found["topk_indices"].dtype is torch.int64
    assert found["topk_logits"].shape == found["topk_indices"].shape == (num_rows, 12, 3)
    model = load(tiny_model)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        tokens = batch["input_ids"][row : row + 1, :length]
        # Of the model itself, whatever the temperature of samples is.
        logits = expected_of(lambda each, tokens=tokens: each(tokens).logits[0], model, LOGPROBS)
        indices = logits.exact.topk(3).indices
        assert_close(found["topk_logits"][row, :length], logits.gather(indices))
        assert torch.equal(found["topk_indices"][row, :length], indices)
        assert not found["topk_logits"][row, length:].any()
        assert not found["topk_indices"][row, length:].any()


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("head", PLAIN)
def test_scores_are_those_of_plain_transformers(pools, judges, section, head):
    batch = make_batch(5)
    parts = pools(2).run(
        scoring_ranks.call_planned,
        config=config_for(judges[head], section, head=head),
        batch=batch,
        section=section,
        method="score",
    )
    scores = gathered(parts)["scores"]
    expected = plain_values(judges[head], head, batch)
    if head == "reward":
        expected = expected[torch.arange(5), batch["input_lengths"] - 1]
    assert scores.dtype is torch.float32
    assert_close(scores, expected)


@pytest.mark.parametrize("head", PLAIN)
def test_judges_train_on_their_scores(pools, judges, head):
    batch = make_batch(4)
    sgd = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}
    trained, *_ = pools(2).run(
        training_ranks.train,
        config=make_config(judges[head], head=head, optimizer=sgd),
        batch=batch,
        loss="squares",
        mbs=1,
    )
    model = PLAIN[head][1].from_pretrained(judges[head], dtype=torch.float32)
    is_token = torch.arange(12) < batch["input_lengths"][:, None]

    def loss_of(model, batch):
        values = model.score(model.model(batch["input_ids"]).last_hidden_state).squeeze(-1)
        if head == "reward":
            scores = values[torch.arange(4), batch["input_lengths"] - 1]
        else:
            scores = values * is_token
        terms = (scores - 1) ** 2
        return terms.sum() / 4, terms * (terms.numel() / 4)

    plain = measured_training(model, partial(torch.optim.SGD, lr=0.1), loss_of, [batch])
    assert_trained_like(plain, trained)


def test_calls_that_a_head_does_not_allow_are_named(pools, tiny_model, judges):
    batch = make_batch(4)
    (errors,) = pools(1).run(
        scoring_ranks.calls_of_the_wrong_head, config=make_config(tiny_model), batch=batch
    )
    assert errors.keys() == {"score", "too many"}
    assert "policy.head='reward' or 'value'" in errors["score"]
    assert "k=65 is not within 1..64" in errors["too many"]
    (errors,) = pools(1).run(
        scoring_ranks.calls_of_the_wrong_head,
        config=make_config(judges["reward"], head="reward"),
        batch=batch,
    )
    assert errors.keys() == {"get_logprobs", "get_topk_logits", "too many", "generate", "train"}
    assert (
        "get_logprobs is not available: it needs policy.head='language_model', got 'reward'"
        in (errors["get_logprobs"])
    )
    assert "LogprobLoss needs log-probabilities" in errors["train"]
