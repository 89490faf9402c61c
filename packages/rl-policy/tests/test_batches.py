import pytest
import torch
from rl_policy.data.batches import ProblemEncoder, completion_batch
from rl_policy.data.datasets import Problem
from rl_policy.data.tiny_model import build_tokenizer

pytestmark = pytest.mark.promise

PROBLEMS = [Problem("1+2=", "3"), Problem("10+20=", "30")]
PAD, END = 0, 1


@pytest.fixture
def tokenizer():
    return build_tokenizer()


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


def test_prompts_are_padded_on_the_right(tokenizer):
    batch = ProblemEncoder(tokenizer).prompt_batch(PROBLEMS)
    assert batch["input_ids"].tolist() == [
        [*ids(tokenizer, "1+2="), PAD, PAD],
        ids(tokenizer, "10+20="),
    ]
    assert batch["input_lengths"].tolist() == [4, 6]
    assert batch["input_ids"].dtype == batch["input_lengths"].dtype == torch.int64


def test_the_targets_of_the_supervised_part_are_the_answers_with_their_end(tokenizer):
    batch = ProblemEncoder(tokenizer).answer_batch(PROBLEMS)
    assert batch["input_ids"].tolist() == [
        [*ids(tokenizer, "1+2=3"), END, PAD, PAD, PAD],
        [*ids(tokenizer, "10+20=30"), END],
    ]
    assert batch["input_lengths"].tolist() == [6, 9]
    assert batch["token_mask"].tolist() == [
        [0, 0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]
    assert batch["sample_mask"].tolist() == [1.0, 1.0]


def generated(tokenizer, rows):
    """Return what `generate` would for `(prompt, completion tokens)` rows."""
    tokens = [[*ids(tokenizer, prompt), *completion] for prompt, completion in rows]
    width = max(map(len, tokens))
    return {
        "output_ids": torch.tensor([row + [PAD] * (width - len(row)) for row in tokens]),
        "generation_lengths": torch.tensor([len(completion) for _, completion in rows]),
        "unpadded_sequence_lengths": torch.tensor([len(row) for row in tokens]),
        "logprobs": torch.zeros(len(rows), width),
    }


def test_a_completion_is_what_follows_the_prompt_without_its_end(tokenizer):
    rows = [
        ("1+2=", [*ids(tokenizer, "3"), END]),
        ("10+20=", ids(tokenizer, "301")),
        ("1+2=", [END]),
    ]
    texts = ProblemEncoder(tokenizer).completion_texts(generated(tokenizer, rows))
    assert texts == ["3", "301", ""]


def test_special_tokens_within_a_completion_do_not_hide(tokenizer):
    five = ids(tokenizer, "5")
    rows = [("1+2=", [*five, PAD, *five, END])]
    (text,) = ProblemEncoder(tokenizer).completion_texts(generated(tokenizer, rows))
    assert text == f"5{tokenizer.pad_token}5"


def test_configured_stop_tokens_end_a_completion_too(tokenizer):
    (stop,) = ids(tokenizer, ";")
    rows = [("1+2=", [*ids(tokenizer, "3"), stop])]
    encoder = ProblemEncoder(tokenizer, stop_token_ids=[stop])
    assert encoder.completion_texts(generated(tokenizer, rows)) == ["3"]


def test_configured_texts_end_a_completion_too(tokenizer):
    rows = [("1+2=", ids(tokenizer, "3;")), ("1+2=", ids(tokenizer, "4=;")), ("1+2=", [END])]
    encoder = ProblemEncoder(tokenizer, stop_strings=["=;", ";"])
    assert encoder.completion_texts(generated(tokenizer, rows)) == ["3", "4", ""]


def test_every_token_of_a_completion_is_a_target_with_its_advantage(tokenizer):
    rows = [("1+2=", [*ids(tokenizer, "3"), END]), ("10+20=", ids(tokenizer, "301"))]
    output = generated(tokenizer, rows)
    output["logprobs"] = torch.rand_like(output["logprobs"])
    batch = completion_batch(output, advantages=torch.tensor([0.5, -1.5]))
    assert batch["token_mask"].tolist() == [
        [0, 0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]
    assert batch["input_lengths"].tolist() == [6, 9]
    assert batch["advantages"].shape == (2, 9)
    assert batch["advantages"][:, 0].tolist() == [0.5, -1.5]
    assert torch.equal(batch["generation_logprobs"], output["logprobs"])


def test_the_chat_template_goes_around_the_prompt_alone(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    encoder = ProblemEncoder(tokenizer, use_chat_template=True)
    prompts, answers = encoder.prompt_tokens(PROBLEMS), encoder.answer_tokens(PROBLEMS)
    assert prompts[0] == ids(tokenizer, "[user]1+2=[assistant]")
    assert answers[0] == [*ids(tokenizer, "3"), END]
    assert (len(prompts), len(answers)) == (len(PROBLEMS), len(PROBLEMS))
    assert encoder.prompt_tokens([]) == []


def test_what_the_tokenizer_lacks_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"data.use_chat_template=True.* no chat template"):
        ProblemEncoder(tokenizer, use_chat_template=True)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no eos_token"):
        ProblemEncoder(tokenizer)
