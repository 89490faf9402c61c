"""Agents that speak OpenAI's protocol, by its own client, as environments in processes."""

import json
import logging
import re
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S, wait_until
from recipe_runs import CONFIG
from rl_batched_data import BatchedDataDict
from rl_policy.cli import build_app
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.datasets import Problem
from rl_policy.data.tiny_model import build_tokenizer
from rl_policy.environments.endpoint import (
    MODEL,
    Endpoint,
    RequestError,
    own_endpoint,
    read_request,
)
from rl_policy.environments.exchange import Failure
from rl_policy.environments.pool import GivenEnvironment, ProcessPool, ThreadPool
from rl_policy.environments.rollouts import EpisodePlayer
from rl_policy.run.metrics import read_metrics
from rl_policy.run.samples import read_samples
from typer.testing import CliRunner

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

# Asks until it is told to stop, and then returns the length of what it was told.
AGENTS = """
import os, time
from pathlib import Path

import openai

def ask(client, model, messages, **options):
    answer = client.chat.completions.create(model=model, messages=messages, **options)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    return choice.message.content

def play(problem, endpoint):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": problem.prompt},
    ]
    told = []
    while True:
        text = ask(client, endpoint.model, messages, temperature=0.3)
        told.append(text)
        messages.append({"role": "assistant", "content": text})
        what = {
            "edit": lambda: messages.__setitem__(0, {"role": "system", "content": "be long"}),
            "own": lambda: messages.append({"role": "assistant", "content": "mine"}),
            "again": lambda: None,
            "empty": lambda: messages.append({"role": "user", "content": " "}),
            "many": lambda: ask(client, endpoint.model, messages, n=2),
            "raise": lambda: 1 / 0,
            "die": lambda: os._exit(7),
            "hang": lambda: time.sleep(3600),
        }.get(text)
        if what:
            what()
        if text == "end":
            return float(len("".join(told)))
        if text == "nan":
            return float("nan")
        if text != "again":
            messages.append({"role": "user", "content": [{"type": "text", "text": f"<{text}>"}]})
            if text == "tool":
                messages.append({"role": "tool", "content": "4"})

async def play_async(problem, endpoint):
    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:
        (model,) = (await client.models.list()).data
        stream = await client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": problem.prompt}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return len(text)

def silent(problem, endpoint):
    return 1.0

def wrong_key(problem, endpoint):
    openai.OpenAI(base_url=endpoint.base_url, api_key="x" * 22).models.list()

def logs_its_end(problem, endpoint):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    try:
        ask(client, endpoint.model, [{"role": "user", "content": problem.prompt}])
    except openai.BadRequestError as error:
        (Path(__file__).parent / f"ended {problem.prompt}").write_text(str(error))
        raise
    return 0.0
"""
PROBLEM = Problem("p", "a")
OPENING = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "p"}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}[assistant:"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents")
    (path / "my_agents.py").write_text(AGENTS)
    return path


@pytest.fixture(scope="module")
def pool(place):
    """Return a function that gives processes of one of the file's, which imports the client."""
    pytest.importorskip("openai", reason="the client is no dependency of what it talks to")
    opened = {}

    def pool_of(name="play", limit_s=PATIENCE_S):
        if (name, limit_s) not in opened:
            function = f"{place}/my_agents.py:{name}"
            opened[name, limit_s] = ProcessPool(function, limit_s=limit_s, max_groups=4)
        return opened[name, limit_s]

    yield pool_of
    for each in opened.values():
        each.close()


def reason(outcome):
    assert isinstance(outcome, Failure), outcome
    return outcome.reason


def test_requests_are_turns_and_what_they_add_is_observed(pool):
    agents = pool()
    started = agents.play({group: {0: PROBLEM, 1: PROBLEM} for group in range(2)})
    assert started == {group: {key: {"prompt": OPENING} for key in (0, 1)} for group in (0, 1)}
    turned = agents.play({0: {0: "one", 1: "tool"}, 1: {1: "end"}})
    observed = [[{"role": "user", "content": f"<{text}>"}] for text in ("one", "tool")]
    observed[1].append({"role": "tool", "content": "4"})
    assert turned == {
        0: {
            number: {"observation": messages, "reward": 0.0, "done": False}
            for number, messages in enumerate(observed)
        },
        1: {1: {"observation": "", "reward": 3.0, "done": True}},
    }
    ended = agents.play({0: {0: "end", 1: "end"}})
    assert [ended[0][number]["reward"] for number in range(2)] == [6.0, 7.0]
    # The next episodes of the processes.
    assert agents.play({0: {0: PROBLEM}})[0][0] == {"prompt": OPENING}


def test_streams_and_coroutines(pool):
    agents = pool("play_async")
    episodes = {number: Problem(f"p{number}") for number in range(8)}
    started = agents.play({0: episodes})
    assert [started[0][number]["prompt"] for number in episodes] == [
        [{"role": "user", "content": f"p{number}"}] for number in episodes
    ]
    ended = agents.play({0: {number: "x" * number for number in episodes}})
    assert [ended[0][number] for number in episodes] == [
        {"observation": "", "reward": float(number), "done": True} for number in episodes
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("edit", r"messages\[0\] is not that of the request before"),
        ("own", "a message of the role 'assistant' after the last answer"),
        ("again", "the request adds no message after the last answer"),
        ("empty", "a message after the last answer has an empty content"),
        ("many", "n=2: an episode has one answer"),
        ("raise", r"it raised ZeroDivisionError: .*my_agents.py:\d+"),
        ("nan", "it returned nan"),
        ("die", "its process ended with status 7"),
        ("hang", r"a call took more than environment.timeout_s=3"),
    ],
)
def test_a_failure_costs_its_group_and_nothing_else(pool, text, message):
    agents = pool(limit_s=3.0 if text == "hang" else PATIENCE_S)
    agents.play({group: {0: PROBLEM, 1: PROBLEM} for group in range(2)})
    turned = agents.play({0: {0: text, 1: "end"}, 1: {0: "end"}})
    assert re.search(message, reason(turned[0]), re.DOTALL)
    assert turned[1][0]["reward"] == 3.0
    assert agents.play({0: {0: PROBLEM}})[0][0] == {"prompt": OPENING}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("silent", "it returned 1.0 without a request: there is no turn to train"),
        ("wrong_key", "AuthenticationError: .*the api_key is of no episode in progress"),
    ],
)
def test_an_agent_that_asks_for_nothing_has_no_episode(pool, name, message):
    (outcome,) = pool(name).play({0: {0: PROBLEM}}).values()
    assert re.search(message, reason(outcome))


def test_the_request_of_an_episode_that_has_ended_is_refused(pool, place):
    agents = pool("logs_its_end")
    agents.play({0: {0: Problem("first")}})
    agents.play({0: {0: Problem("second")}})
    log = place / "ended first"
    wait_until(lambda: log.exists() and log.read_text(), what="the agent's log")
    assert "the episode has ended" in log.read_text()
    assert not (place / "ended second").exists()


def request(url, key, body=None, **headers):
    """Return status and answer of a request."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}", **headers})
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


@pytest.fixture(scope="module")
def endpoint():
    opened = Endpoint()
    yield opened
    opened.shutdown()
    opened.server_close()


def test_an_endpoint_answers_its_keys_alone(endpoint):
    class Echo:
        def ask(self, messages):
            return messages[-1]["content"]

    key = endpoint.add(Echo())
    chat = f"{endpoint.base_url}/chat/completions"
    assert endpoint.server_address[0] == "127.0.0.1"
    body = {"model": MODEL, "messages": OPENING}
    status, answer = request(chat, key, body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "p")
    assert request(chat, "other", body)[0] == 401
    assert request(f"{endpoint.base_url}/models", key)[1]["data"][0]["id"] == MODEL
    for path in ("completions", "embeddings"):
        status, text = request(f"{endpoint.base_url}/{path}", key, body)
        assert (status, text.endswith("there is /v1/chat/completions")) == (400, True)
    for length in ("-1", "99999999999"):
        status, text = request(chat, key, body, **{"Content-Length": length})
        assert status == 413, text
    endpoint.remove(key)
    assert request(chat, key, body)[0] == 401


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt-4"}, "model='gpt-4': the endpoint has 'policy' alone"),
        ({"messages": "hello"}, "a list of messages"),
        ({"n": 3}, "n=3"),
        ({"tools": [{}], "logprobs": True}, "logprobs, tools: the endpoint answers"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object with a role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a text"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            r"messages\[0\].tool_calls: calls of tools are texts here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\].content has parts that are no text",
        ),
    ],
)
def test_what_a_turn_cannot_be_is_refused(changes, message):
    body = {"model": MODEL, "messages": OPENING} | changes
    with pytest.raises(RequestError, match=message):
        read_request(json.dumps(body).encode())
    with pytest.raises(RequestError, match="the body is no JSON"):
        read_request(b"{")


def test_an_agent_of_the_program_is_in_a_thread():
    seen = []

    def play(problem, endpoint):
        seen.append(threading.current_thread().name)
        body = {"model": endpoint.model, "messages": OPENING}
        status, answer = request(f"{endpoint.base_url}/chat/completions", endpoint.api_key, body)
        seen.append(answer["choices"][0]["message"]["content"])
        return status

    pool = ThreadPool(GivenEnvironment(play), limit_s=PATIENCE_S, max_groups=1)
    assert pool.play({0: {0: PROBLEM}}) == {0: {0: {"prompt": OPENING}}}
    ended = pool.play({0: {0: "a turn"}})
    assert ended == {0: {0: {"observation": "", "reward": 200.0, "done": True}}}
    assert seen == ["agent", "a turn"]
    pool.close()


def test_an_agent_whose_environment_is_dropped_waits_no_longer():
    answers = []

    def play(problem, endpoint):
        body = {"model": endpoint.model, "messages": OPENING}
        url = f"{endpoint.base_url}/chat/completions"
        answers.append(request(url, endpoint.api_key, body))
        return 0.0

    pool = ThreadPool(GivenEnvironment(play), limit_s=PATIENCE_S, max_groups=1)
    pool.play({0: {0: PROBLEM}})
    assert not answers
    pool.close()
    wait_until(lambda: answers, what="an answer")
    assert answers == [(400, "the episode has ended")]
    assert not own_endpoint()._conversations


def test_a_client_that_leaves_is_no_error(endpoint, caplog):
    answering = threading.Event()

    class Slow:
        def ask(self, messages):
            answering.wait(PATIENCE_S)
            return "x" * 10_000_000

    body = json.dumps({"model": MODEL, "messages": OPENING})
    with socket.create_connection(endpoint.server_address) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
        key = f"Authorization: Bearer {endpoint.add(Slow())}\r\n\r\n"
        client.sendall((head + key + body).encode())
    with caplog.at_level(logging.DEBUG):
        answering.set()
        wait_until(lambda: "has failed" in caplog.text, what="the failure in the log")
    assert {each.levelno for each in caplog.records if "has failed" in each.getMessage()} == {
        logging.DEBUG
    }


class Sampler:
    """Samples the same turns for all episodes, each with a token that no text has."""

    def __init__(self, encoder, turns):
        self.encoder, self.turns, self.prompts = encoder, iter(turns), []

    def generate(self, data, greedy=False):
        tokenizer = self.encoder.tokenizer
        lengths = data["input_lengths"].tolist()
        prompts = [row[:end] for row, end in zip(data["input_ids"].tolist(), lengths, strict=True)]
        self.prompts.append([tokenizer.decode(prompt) for prompt in prompts])
        turn = [*tokenizer.encode(next(self.turns)), tokenizer.eos_token_id]
        rows = self.encoder.token_batch([prompt + turn for prompt in prompts])
        return BatchedDataDict(
            output_ids=rows["input_ids"],
            unpadded_sequence_lengths=rows["input_lengths"],
            generation_lengths=torch.full((len(prompts),), len(turn)),
            logprobs=torch.zeros(rows["input_ids"].shape),
        )


def test_the_policy_reads_its_own_tokens_and_the_template_around_them(pool):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    encoder = ProblemEncoder(tokenizer)
    agents = pool()
    player = EpisodePlayer(
        pool=agents,
        encoder=encoder,
        max_turns=3,
        max_length=200,
        max_new_tokens=20,
        role="user",
    )
    sampler = Sampler(encoder, ["tool", "end"])
    episodes = player.play(sampler, [PROBLEM] * 2, group_size=2)
    opening = "[system:be brief][user:p][assistant:"
    end = tokenizer.eos_token
    after = "][user:<tool>][tool:4][assistant:"
    assert sampler.prompts == [[opening] * 2, [f"{opening}tool{end}{after}"] * 2]
    assert episodes["rewards"].tolist() == [7.0, 7.0]
    for row in range(2):
        tokens = episodes["output_ids"][row][: episodes["unpadded_sequence_lengths"][row]]
        assert tokenizer.decode(tokens) == f"{opening}tool{end}{after}end{end}"
        sampled = tokens[episodes["is_sampled"][row][: len(tokens)]]
        assert tokenizer.decode(sampled) == f"tool{end}end{end}"
    said = [("policy", "tool"), ("environment", "<tool>\n4"), ("policy", "end")]
    assert episodes["turns"] == [said, said]


PLAIN_AGENT = """
import json, urllib.request

def ask(endpoint, messages):
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {endpoint.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=900) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def play(problem, endpoint):
    '''Two turns, of which those that begin early in the alphabet are rewarded.'''
    messages = [{"role": "user", "content": problem.prompt}]
    first = ask(endpoint, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    second = ask(endpoint, messages)
    return sum(bytes(each, "utf8")[0] < 128 for each in (first, second) if each) / 2
"""


def write_run(path, template):
    (path / "my_agent.py").write_text(PLAIN_AGENT)
    rows = [{"prompt": f"{number}?"} for number in range(60)]
    (path / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    config = {
        "cluster": CONFIG["cluster"],
        "data": {"path": "problems.jsonl", "num_heldout": 8},
        "policy": {**CONFIG["policy"], "max_total_sequence_length": 64},
        "grpo": CONFIG["grpo"],
        "environment": {"function": "my_agent.py:play"},
    }
    config["policy"]["tokenizer"] = {"chat_template": template}
    (path / "run.yaml").write_text(json.dumps(config))


@pytest.mark.slow
def test_a_run_trains_on_what_an_agent_has_asked_for(tmp_path, monkeypatch, shared_ray):
    write_run(tmp_path, TEMPLATE)
    monkeypatch.chdir(tmp_path)
    arguments = ["grpo", "--config", "run.yaml", "--out", "run"]
    result = CliRunner().invoke(build_app(), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    rows = read_metrics(Path("run/metrics.jsonl"))
    assert [row["turns_mean"] for row in rows[1:]] == [2.0] * 4
    assert [row["environment_failures"] for row in rows[1:]] == [0.0] * 4
    assert len({row["loss"] for row in rows[1:]}) > 1
    sample = read_samples(Path("run/samples.jsonl"))[-1]
    assert [turn["role"] for turn in sample.turns] == ["policy", "environment", "policy"]
    assert sample.turns[1]["text"] == "more"
    observed = "".join(
        token for token, sampled in zip(sample.tokens, sample.sampled, strict=True) if not sampled
    )
    assert observed == "][user:more][assistant:"


def test_messages_without_a_chat_template_are_refused(tmp_path, monkeypatch):
    write_run(tmp_path, None)
    monkeypatch.chdir(tmp_path)
    arguments = ["grpo", "--config", "run.yaml", "--out", "run"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 2, result.output
    assert "has no chat template: set policy.tokenizer.chat_template" in result.stderr
    assert not Path("run").exists()
