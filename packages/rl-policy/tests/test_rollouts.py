"""Episodes of several turns: which tokens are sampled, appended, and trained."""

import logging

import pytest
import torch
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_interfaces import GenerationInterface
from rl_policy.data.batches import ProblemEncoder, completion_batch
from rl_policy.data.datasets import Problem
from rl_policy.data.tiny_model import END, PAD, build_tokenizer
from rl_policy.environments.pool import GivenEnvironment, ThreadPool
from rl_policy.environments.rollouts import EnvironmentFailure, EpisodePlayer, episode_metrics
from rl_policy.recipes.policy_gradient.resampling import resample
from rl_policy.recipes.policy_gradient.step import Rollout
from rl_policy.run.samples import SampleLog, read_samples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def merging_tokenizer(template=None):
    """Return one of bytes, with the tokens `ab` and `<|im_start|>` besides."""
    tokens = [PAD, END, "<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


class Script(GenerationInterface):
    """Samples what a script says: by prompt's text, the tokens of each turn."""

    def __init__(self, encoder, turns, starts):
        self.encoder, self.turns, self.starts = encoder, turns, starts
        self.calls = []

    def generate(self, data, greedy=False):
        rows = [
            row[:length]
            for row, length in zip(
                data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True
            )
        ]
        self.calls.append(rows)
        made = []
        for row in rows:
            name = next(name for name, start in self.starts.items() if row[: len(start)] == start)
            made.append(self.turns[name].pop(0))
        batch = self.encoder.token_batch([a + b for a, b in zip(rows, made, strict=True)])
        logprobs = torch.zeros(batch["input_ids"].shape)
        for index, (row, turn) in enumerate(zip(rows, made, strict=True)):
            # As many as there are, so that a column that is shifted shows.
            logprobs[index, len(row) : len(row) + len(turn)] = -torch.arange(
                1.0, len(turn) + 1
            ) - 10 * len(self.calls)
        return BatchedDataDict(
            {
                "output_ids": batch["input_ids"],
                "unpadded_sequence_lengths": batch["input_lengths"],
                "generation_lengths": torch.tensor([len(turn) for turn in made]),
                "logprobs": logprobs,
                "weight_versions": torch.where(logprobs < 0, len(self.calls), -2),
            }
        )

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True


class Answers:
    """Answers each turn by the next text of the problem's column."""

    def reset(self, problem):
        self.replies = list(problem.columns["replies"])
        return problem.columns.get("prompt")

    def step(self, text):
        if text == "raise":
            raise RuntimeError("on purpose")
        observation, reward = self.replies.pop(0)
        return observation or "", reward, observation is None


def player_of(encoder, *, max_turns=4, max_length=99, max_new_tokens=9, max_groups=8, role="user"):
    pool = ThreadPool(GivenEnvironment(Answers), limit_s=PATIENCE_S, max_groups=max_groups)
    return EpisodePlayer(
        pool=pool,
        encoder=encoder,
        max_turns=max_turns,
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        role=role,
    )


def played(encoder, problems, turns, *, group_size=1, **options):
    """Return the episodes of turns by prompt, as texts or tokens, and the script."""
    tokens = {
        name: [
            encoder.tokenizer.encode(turn, add_special_tokens=False)
            if isinstance(turn, str)
            else turn
            for turn in each
        ]
        for name, each in turns.items()
    }
    starts = {
        problem.prompt: encoder.prompt_tokens([problem])[0] for problem in problems
    } | options.pop("starts", {})
    script = Script(encoder, tokens, starts)
    player = player_of(encoder, **options)
    return player.play(script, problems, group_size=group_size), script


def problem(text, *replies, **columns):
    return Problem(text, "x", {"replies": replies, **columns})


def masked(episodes, row, name="is_sampled"):
    return episodes["output_ids"][row][episodes[name][row].bool()].tolist()


def test_what_was_sampled_is_kept_where_its_text_has_other_tokens():
    encoder = ProblemEncoder(merging_tokenizer())
    a, b, end = encoder.tokenizer.convert_tokens_to_ids(["a", "b", END])
    sampled = [[a, b, end], [b, a, b, end]]
    text = encoder.tokenizer.decode([a, b])
    assert encoder.tokenizer.encode(text) != [a, b], "the round trip is to differ"
    start = problem("ab?", ("abab", 0.5), (None, 1.0))
    episodes, script = played(encoder, [start], {"ab?": [list(each) for each in sampled]})
    prompt = encoder.tokenizer.encode("ab?")
    observation = encoder.tokenizer.encode("abab")
    assert len(observation) == 2
    assert script.calls == [[prompt], [prompt + sampled[0] + observation]]
    whole = prompt + sampled[0] + observation + sampled[1]
    assert episodes["output_ids"].tolist() == [whole]
    assert masked(episodes, 0) == sampled[0] + sampled[1]
    assert episodes["logprobs"].tolist() == [
        [0.0] * 2 + [-11.0, -12.0, -13.0] + [0.0] * 2 + [-21.0, -22.0, -23.0, -24.0]
    ]
    # As a sampler whose weights change between the turns gives them.
    assert episodes["weight_versions"].tolist() == [[-2] * 2 + [1] * 3 + [-2] * 2 + [2] * 4]
    assert episodes["generation_lengths"].tolist() == [7]
    assert episodes["rewards"].tolist() == [1.5]
    batch = completion_batch(episodes, advantages=torch.ones(1))
    assert batch["input_ids"].tolist() == [whole]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]]
    assert batch["sample_mask"].tolist() == [1.0]
    assert torch.equal(batch["generation_logprobs"], episodes["logprobs"])


@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_turns_stand_in_the_chat_template_as_it_renders_them(role):
    tokenizer = merging_tokenizer(TEMPLATE)
    encoder = ProblemEncoder(tokenizer, use_chat_template=True)
    # The second turn was cut, and its end is appended.
    turns = [f"first{END}", "second", f"third{END}"]
    start = problem("ab?", ("one", 0), ("two", 0), (None, 1))
    episodes, _ = played(encoder, [start], {"ab?": list(turns)}, max_new_tokens=6, role=role)
    messages = [
        {"role": "user", "content": "ab?"},
        {"role": "assistant", "content": "first"},
        {"role": role, "content": "one"},
        {"role": "assistant", "content": "second"},
        {"role": role, "content": "two"},
        {"role": "assistant", "content": "third"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(episodes["output_ids"][0]) == rendered
    assert tokenizer.decode(masked(episodes, 0)) == "".join(turns)
    assert episodes["is_truncated"].tolist() == [True]
    assert episodes["turns"] == [
        [
            ("policy", "first"),
            ("environment", "one"),
            ("policy", "second"),
            ("environment", "two"),
            ("policy", "third"),
        ]
    ]


def test_a_prompt_of_the_environment_s_takes_the_place_of_the_problem_s():
    tokenizer = merging_tokenizer(TEMPLATE)
    encoder = ProblemEncoder(tokenizer)
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    problems = [
        Problem("p", "", {"replies": [(None, 1)], "prompt": "another"}),
        Problem("q", "", {"replies": [(None, 1)], "prompt": "another"}, conversation),
        Problem("r", "", {"replies": [(None, 1)]}, conversation),
    ]
    starts = {"p": tokenizer.encode("another"), "q": [2, 87], "r": [2, 85]}
    texts = [
        "another",
        "<|im_start|>user\nanother<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n",
    ]
    starts = {name: tokenizer.encode(text) for name, text in zip("pqr", texts, strict=True)}
    turns = {name: [END] for name in "pqr"}
    episodes, script = played(encoder, problems, turns, starts=starts)
    assert [tokenizer.decode(row) for row in script.calls[0]] == texts
    assert episodes["prompts"] == ["another", "another", "r"]


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{{ messages[0].content }}{{ messages[1].content }}", "tool"),
        ("{{ messages[0].content }}{{ messages[2].content }}", "assistant"),
    ],
)
def test_a_template_without_several_turns_is_refused(template, role):
    tokenizer = merging_tokenizer(template)
    encoder = ProblemEncoder(tokenizer, use_chat_template=True)
    with pytest.raises(ValueError, match=rf"policy\.tokenizer\.chat_template .*the role '{role}'"):
        encoder.check_turns([Problem("p")], role="tool")
    ProblemEncoder(tokenizer).check_turns([Problem("p")], role="tool")


def test_all_conversations_advance_together_and_those_that_end_drop_out():
    encoder = ProblemEncoder(build_tokenizer())
    problems = [
        problem("one", (None, 1)),
        problem("two", ("x", 0.25), (None, 0.5)),
        problem("four", ("x", 0), ("x", 0), ("x", 0), ("x", 0)),
    ]
    turns = {"one": [f"1{END}"], "two": [f"2{END}"] * 2, "four": [f"4{END}"] * 4}
    episodes, script = played(encoder, problems, turns, max_turns=3)
    assert [len(rows) for rows in script.calls] == [3, 2, 1]
    assert episodes["num_turns"].tolist() == [1, 2, 3]
    assert episodes["rewards"].tolist() == [1.0, 0.75, 0.0]
    assert episodes["is_turn_limited"].tolist() == [False, False, True]
    assert episodes["is_truncated"].tolist() == [False] * 3
    # After the last turn there is no observation that nobody reads.
    assert encoder.tokenizer.decode(episodes["output_ids"][2]) == f"four4{END}x4{END}x4{END}"
    assert episode_metrics(episodes, group_size=1) == {
        "turns_mean": 2.0,
        "turn_limit_share": pytest.approx(1 / 3),
        "environment_failures": 0.0,
    }


@pytest.mark.parametrize(
    ("max_length", "num_turns", "tokens"),
    [
        (9, 2, 8),  # room for the observation and a token
        (8, 2, 8),  # the turn that fills it is answered, and rewarded
        (6, 1, 4),  # room for the observation and no token
        (5, 1, 4),
    ],
)
def test_an_episode_ends_where_its_context_runs_out(max_length, num_turns, tokens):
    encoder = ProblemEncoder(build_tokenizer())
    start = problem("ab", ("xy", 0.5), ("xy", 0.5), ("xy", 0.5))
    turns = {"ab": [f"1{END}", "2" + ("3" if max_length == 8 else END), f"4{END}"]}
    episodes, _ = played(encoder, [start], turns, max_length=max_length)
    assert episodes["num_turns"].tolist() == [num_turns]
    assert episodes["unpadded_sequence_lengths"].tolist() == [tokens]
    assert episodes["is_truncated"].tolist() == [True]
    assert episodes["is_turn_limited"].tolist() == [False]
    assert episodes["rewards"].tolist() == [0.5 * num_turns]
    assert encoder.truncated_share(episodes, max_new_tokens=99) == 1.0


def test_a_failure_leaves_its_group_out(caplog):
    encoder = ProblemEncoder(build_tokenizer())
    problems = [problem(name, (None, 1)) for name in "aabbcc"]
    turns = {"a": ["1", "1"], "b": ["1", "raise"], "c": ["1", "1"]}
    with caplog.at_level(logging.WARNING):
        episodes, _ = played(encoder, problems, turns, group_size=2, max_new_tokens=1)
    assert episodes["sample_mask"].tolist() == [1, 1, 0, 0, 1, 1]
    assert episodes["token_mask"].sum(1).tolist() == [1, 1, 0, 0, 1, 1]
    assert episodes["rewards"].tolist() == [1, 1, 0, 0, 1, 1]
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert "environment.function='Answers': it raised RuntimeError: on purpose" in text
    assert "for the prompt 'b' in turn 1: its group is left out" in text
    metrics = episode_metrics(episodes, group_size=2)
    assert metrics["environment_failures"] == 1.0
    # Those of the failed group are no part of what is measured.
    assert encoder.truncated_share(episodes, max_new_tokens=1) == 1.0


def test_more_groups_than_processes_play_one_after_the_other():
    encoder = ProblemEncoder(build_tokenizer())
    problems = [problem(name, (name, 0), (None, 1)) for name in "abcde" for _ in range(2)]
    turns = {name: [f"{name}{turn}{END}" for turn in "1122"] for name in "abcde"}
    episodes, script = played(encoder, problems, turns, group_size=2, max_groups=2)
    assert [len(rows) for rows in script.calls] == [4, 4, 4, 4, 2, 2]
    texts = [encoder.tokenizer.decode(row) for row in episodes["output_ids"]]
    assert texts == [f"{name}{name}1{END}{name}{name}2{END}" for name in "abcde" for _ in range(2)]
    assert episodes["rewards"].tolist() == [1.0] * 10


def test_a_run_with_no_group_left_ends():
    encoder = ProblemEncoder(build_tokenizer())
    problems = [problem(name, (None, 1)) for name in "abcde"]
    turns = {name: ["raise"] for name in "abcde"}
    with pytest.raises(EnvironmentFailure, match=r"in all 5 groups .*'a' in turn 1; .*'c' in turn"):
        played(encoder, problems, turns)


def test_a_group_that_has_failed_is_sampled_again_where_groups_are(caplog):
    encoder = ProblemEncoder(build_tokenizer())
    rounds = [
        ({"a": ["1", "raise"], "b": [f"1{END}", "2"]}, "aabb"),
        ({"c": ["1", f"longer{END}"]}, "cc"),
    ]

    def sample(num_groups):
        turns, names = rounds.pop(0)
        assert len(names) == 2 * num_groups
        problems = [problem(name, (None, at % 2)) for at, name in enumerate(names)]
        episodes, _ = played(encoder, problems, turns, group_size=2)
        return Rollout(problems=problems, generated=episodes, rewards=episodes["rewards"].tolist())

    rollout, measured = resample(
        sample, num_groups=2, group_size=2, max_rounds=3, each_reward=False, pad_id=encoder.pad_id
    )
    assert measured["dynamic_rounds"] == 1.0
    generated = rollout.generated
    assert generated["prompts"] == ["b", "b", "c", "c"]
    assert [turns[0][1] for turns in generated["turns"]] == ["1", "2", "1", "longer"]
    assert generated["token_mask"].sum(1).tolist() == [2, 1, 1, 7]
    assert generated["sample_mask"].tolist() == [1.0] * 4
    batch = completion_batch(generated)
    assert batch["token_mask"].shape == batch["input_ids"].shape == (4, 8)


@pytest.mark.parametrize("prompt", ["", "long" * 30])
def test_a_prompt_without_room_for_a_turn_is_a_failure(prompt, caplog):
    encoder = ProblemEncoder(build_tokenizer())
    problems = [problem("a", (None, 1), prompt=prompt), problem("b", (None, 1))]
    episodes, _ = played(encoder, problems, {"b": [f"1{END}"]})
    assert episodes["sample_mask"].tolist() == [0, 1]
    named = f"a prompt of {len(prompt)} tokens, of which there must be 1 to 98"
    assert named in caplog.records[0].getMessage()


def test_samples_have_the_turns_and_say_what_was_sampled(tmp_path):
    encoder, path = ProblemEncoder(build_tokenizer()), tmp_path / "samples.jsonl"
    problems = [problem("ab", ("xy", 0.5), (None, 1)), problem("c", (None, 0))]
    turns = {"ab": [f"1{END}", "2"], "c": [f"3{END}"]}
    episodes, _ = played(encoder, problems, turns)
    log = SampleLog(path, limit=8, encoder=encoder)
    log.record(3, "eval", problems, episodes, episodes["rewards"].tolist())
    first, second = read_samples(path)
    assert (first.prompt, first.completion, first.reward) == ("ab", "1\nxy\n2", 1.5)
    assert first.turns == [
        {"role": "policy", "text": "1"},
        {"role": "environment", "text": "xy"},
        {"role": "policy", "text": "2"},
    ]
    assert first.tokens == ["1", END, "x", "y", "2"]
    assert first.sampled == [True, True, False, False, True]
    assert first.logprobs == [-11.0, -12.0, 0.0, 0.0, -21.0]
    assert (second.tokens, second.sampled) == (["3", END], [True, True])
