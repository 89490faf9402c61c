import json

import torch
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.datasets import Problem
from rl_policy.data.tiny_model import build_tokenizer
from rl_policy.run.samples import SampleLog, read_samples

PROBLEMS = [Problem("1+1=", "2"), Problem("2+2=", "4"), Problem("3+3=", "6")]


def generated(encoder, completions):
    """Return what `generate` would of these completions, with a logprob of -0.5 times the index."""
    prompts, answers = (
        encoder.prompt_tokens(PROBLEMS),
        encoder.answer_tokens(
            [
                Problem(problem.prompt, text)
                for problem, text in zip(PROBLEMS, completions, strict=True)
            ]
        ),
    )
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), width), encoder.pad_id)
    logprobs = torch.zeros(len(prompts), width)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ends = len(prompt), len(prompt) + len(answer)
        ids[row, : ends[1]] = torch.tensor([*prompt, *answer])
        logprobs[row, slice(*ends)] = -0.5 * torch.arange(1, len(answer) + 1)
    return {
        "output_ids": ids,
        "logprobs": logprobs,
        "generation_lengths": torch.tensor([len(answer) for answer in answers]),
        "unpadded_sequence_lengths": torch.tensor(
            [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        ),
    }


def encoder_of():
    return ProblemEncoder(build_tokenizer())


def test_the_first_completions_are_recorded_with_their_tokens(tmp_path):
    encoder, path = encoder_of(), tmp_path / "samples.jsonl"
    log = SampleLog(path, limit=2, encoder=encoder)
    batch = generated(encoder, ["2", "15", "6"])
    log.record(0, "eval", PROBLEMS, batch, [1.0, 0.0, 1.0])
    advantages = torch.tensor([0.5, -0.5, 0.5])
    log.record(3, "train", PROBLEMS, batch, [1.0, 0.0, 1.0], advantages=advantages)
    samples = read_samples(path)
    assert [(each.step, each.kind, each.reward, each.advantage) for each in samples] == [
        (0, "eval", 1.0, None),
        (0, "eval", 0.0, None),
        (3, "train", 1.0, 0.5),
        (3, "train", 0.0, -0.5),
    ]
    second = samples[1]
    assert (second.prompt, second.answer, second.completion) == ("2+2=", "4", "15")
    assert second.tokens == ["1", "5", "<|im_end|>"]
    assert second.logprobs == [-0.5, -1.0, -1.5]


def test_what_ends_a_line_elsewhere_ends_none_here(tmp_path):
    encoder, path = encoder_of(), tmp_path / "samples.jsonl"
    log = SampleLog(path, limit=3, encoder=encoder)
    texts = ["a\u2028b", "a\x85b", "\u2029"]
    log.record(0, "eval", PROBLEMS, generated(encoder, texts), [0.0] * 3)
    log.keep_steps(0)
    assert [each.completion for each in read_samples(path)] == texts


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    encoder, path = encoder_of(), tmp_path / "samples.jsonl"
    log = SampleLog(path, limit=1, encoder=encoder)
    log.keep_steps(2)  # there is no file yet
    for step in (0, 2, 4):
        log.record(step, "eval", PROBLEMS, generated(encoder, ["2", "4", "6"]), [1.0, 1.0, 1.0])
    with path.open("a") as file:
        file.write('{"step": 6, "ki')
    assert [each.step for each in read_samples(path)] == [0, 2, 4]
    log.keep_steps(2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2]


def test_no_samples_are_an_empty_record(tmp_path):
    encoder, path = encoder_of(), tmp_path / "samples.jsonl"
    assert read_samples(path) == []
    batch = generated(encoder, ["2", "4", "6"])
    SampleLog(path, limit=0, encoder=encoder).record(0, "eval", PROBLEMS, batch, [1.0, 1.0, 1.0])
    assert read_samples(path) == []


def test_a_completion_is_truncated_where_neither_token_nor_string_ends_it():
    encoder = encoder_of()
    batch = generated(encoder, ["2", "15", "678"])  # 2, 3 and 4 tokens with the end token
    assert encoder.truncated_share(batch, max_new_tokens=9) == 0.0
    assert encoder.truncated_share(batch, max_new_tokens=2) == 0.0
    cut = {**batch, "generation_lengths": batch["generation_lengths"] - 1}
    cut["unpadded_sequence_lengths"] = batch["unpadded_sequence_lengths"] - 1
    assert encoder.truncated_share(cut, max_new_tokens=2) == 2 / 3
    stopping = ProblemEncoder(build_tokenizer(), stop_strings=["15"])
    assert stopping.truncated_share(cut, max_new_tokens=2) == 1 / 3
