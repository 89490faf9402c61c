"""Answers of the OpenAI server as rollouts, the key and the settings, without vLLM."""

import asyncio
import json
import socket
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE_S
from rl_policy.cli import build_app
from rl_policy.commands.serve import (
    ServeOptions,
    ServeSection,
    _served_model,
    api_key,
    load_serve_config,
)
from rl_policy.generation.answers import join_stream, read_answers
from rl_policy.generation.state import EngineState, EngineStateError
from rl_policy.generation.vllm import serving
from rl_policy.generation.vllm.answers import (
    Answer,
    TrainableAnswers,
    answer_in_progress,
    asking_for_tokens,
)
from rl_policy.generation.vllm.engine.running import RequestLoop
from rl_policy.generation.vllm.engine.turns import EngineThread
from rl_policy.generation.vllm.serving import (
    MAX_REQUEST_BYTES,
    ApiServer,
    EngineClient,
    ServerSettings,
)
from rl_policy.run import export
from rl_policy.run.directory import CheckpointManager, RunDirectory, RunState
from typer.testing import CliRunner

KEY = "a-key-of-some-length"
CHOICE = {"index": 0, "finish_reason": "stop", "token_ids": [4, 5], "weight_versions": [8, 9]}
CHAT = CHOICE | {"logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}}
TEXT = CHOICE | {"logprobs": {"token_logprobs": [-0.3, -0.4]}, "prompt_token_ids": [3]}


async def nothing(scope, receive, send):
    """Answer to the start and the end of a server alone."""
    for kind in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{kind}.complete"})


def test_a_server_that_has_ended_by_itself_is_noticed(monkeypatch):
    async def build(client, settings):
        return nothing

    monkeypatch.setattr(serving, "_build_app", build)
    server = ApiServer(None, ServerSettings(name="tiny", api_key=KEY), port=0)
    try:
        assert server.is_alive
        server._server.should_exit = True
        server._thread.join(PATIENCE_S)
        assert not server.is_alive
    finally:
        server.close()


@pytest.fixture
def thread():
    thread = EngineThread()
    yield thread
    thread.close()


ADAPTER = object()


def client_on(thread, step):
    """Return a client of an engine that is its steps alone, and its requests."""
    engine = SimpleNamespace(
        vllm_config=None,
        model_config=None,
        renderer=None,
        input_processor=None,
        add_request=lambda name, prompt, params, lora_request: f"{name}-abc",
    )
    requests = RequestLoop(thread, step=step, abort=list)
    client = EngineClient(
        engine,
        thread=thread,
        requests=requests,
        state=EngineState(),
        adapter=ADAPTER,
        timeout_s=PATIENCE_S,
    )
    return client, requests


def test_no_prefix_is_shared_by_two_versions_of_the_weights(thread):
    added = []
    client, _ = client_on(thread, step=list)

    def add_request(name, prompt, params, lora_request):
        # What the trainer's adapters are: every request is sampled with them.
        assert lora_request is ADAPTER
        added.append(prompt)
        return name

    client._engine.add_request = add_request
    for version in (4, 5):
        client._state = EngineState(version)
        for prompt in ({"prompt_token_ids": [1]}, {"prompt_token_ids": [1], "cache_salt": "mine"}):
            thread.run(client._add, "a-name", prompt, None, print)
    salts = [prompt["cache_salt"] for prompt in added]
    assert len(set(salts)) == 4
    assert all(prompt["prompt_token_ids"] == [1] for prompt in added)


async def outputs_of(client):
    answer_in_progress.set(Answer())
    return [output async for output in client.generate({}, SimpleNamespace(n=1), "a-name")]


def test_a_client_that_leaves_before_its_request_is_added_costs_nothing(thread):
    """It waits for a step that is long."""
    client, requests = client_on(thread, step=list)
    step_ends = threading.Event()

    async def leave():
        asking = asyncio.create_task(outputs_of(client))
        # The call is on its way to the engine's thread, or there.
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        step_ends.set()

    thread.post(step_ends.wait)
    asyncio.run(leave())
    thread.run(list)
    assert requests.num_streams == 0
    assert requests.wait_idle(PATIENCE_S)


def test_a_server_that_ends_during_a_step_costs_nobody_else(thread):
    is_stepping, is_over = threading.Event(), threading.Event()

    def step():
        if not requests.num_streams:
            return []
        is_stepping.set()
        is_over.wait(PATIENCE_S)
        return [
            SimpleNamespace(request_id="served-0", finished=False, outputs=[]),
            SimpleNamespace(request_id="7", finished=True),
        ]

    client, requests = client_on(thread, step)

    async def serve():
        asking = asyncio.create_task(outputs_of(client))
        assert await asyncio.to_thread(is_stepping.wait, PATIENCE_S)
        return asking

    batch = thread.run(requests.add, ["7-abc"])
    assert asyncio.run(serve()).cancelled()
    is_over.set()
    assert [each.request_id for each in batch.result(PATIENCE_S)] == ["7"]
    assert requests.wait_idle(PATIENCE_S)


def test_a_client_that_waits_is_woken_and_asks_the_engine_for_nothing_meanwhile(thread):
    client, requests = client_on(thread, step=list)
    attempts = []

    def add(name, prompt, params, deliver):
        attempts.append(name)
        requests.require_open()
        deliver(SimpleNamespace(finished=True, outputs=[]))

    client._add = add

    async def ask():
        asking = asyncio.create_task(outputs_of(client))
        await asyncio.sleep(0.5)
        assert (len(attempts), asking.done()) == (1, False)
        requests.release()
        (output,) = await asyncio.wait_for(asking, PATIENCE_S)
        return output

    requests.hold()
    assert asyncio.run(ask()).finished
    assert len(attempts) == 2
    # What is woken later has nobody that waits.
    assert requests._wakers == []


def test_a_client_that_is_never_woken_learns_why_after_its_limit(thread):
    client, requests = client_on(thread, step=list)
    client._timeout_s = 0.2
    requests.hold()
    with pytest.raises(EngineStateError, match="waits for its requests to end"):
        asyncio.run(asyncio.wait_for(outputs_of(client), PATIENCE_S))
    assert requests._wakers == []


def test_a_port_that_is_taken_is_named_to_a_program():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        settings = ServerSettings(name="tiny", api_key=KEY)
        with pytest.raises(ValueError, match=f"^host='127.0.0.1', port={port}: Address already"):
            ApiServer(None, settings, port=port)


def test_the_command_and_a_program_take_requests_of_one_size():
    assert ServeSection().max_request_bytes == MAX_REQUEST_BYTES
    assert ServerSettings(name="tiny", api_key=KEY).max_request_bytes == MAX_REQUEST_BYTES


def test_each_choice_is_a_row():
    second = CHAT | {"index": 1, "token_ids": [6], "weight_versions": [9]}
    second["logprobs"] = {"content": [{"logprob": -0.5}]}
    found = read_answers(
        [{"prompt_token_ids": [1, 2], "choices": [CHAT, second]}, {"choices": [TEXT]}],
        pad_token_id=0,
    )
    assert found["output_ids"].tolist() == [[1, 2, 4, 5], [1, 2, 6, 0], [3, 4, 5, 0]]
    assert found["generation_lengths"].tolist() == [2, 1, 2]
    assert found["weight_versions"].tolist() == [[-2, -2, 8, 9], [-2, -2, 9, -2], [-2, 8, 9, -2]]
    expected = torch.tensor([[0, 0, -0.1, -0.2], [0, 0, -0.5, 0], [0, -0.3, -0.4, 0]])
    assert torch.equal(found["logprobs"], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": None}, r"answers\[0\].choices\[0\] has no token_ids"),
        ({"weight_versions": None}, "no weight_versions"),
        ({"logprobs": None}, "2 tokens, 0 log-probabilities and 2 versions"),
        ({"token_ids": [4, 5, 6]}, "3 tokens, 2 log-probabilities"),
        ({"prompt_token_ids": None}, "no prompt_token_ids"),
    ],
)
def test_answers_of_other_servers_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        read_answers([{"choices": [TEXT | change]}], pad_token_id=0)
    with pytest.raises(ValueError, match="no answers"):
        read_answers([], pad_token_id=0)
    with pytest.raises(ValueError, match=r"answers\[1\] has no choices: .*too long"):
        read_answers([{"choices": [TEXT]}, {"error": {"message": "too long"}}], pad_token_id=0)


def chunk(index, token=None, **values):
    part = {"index": index, "finish_reason": None} | values
    if token is not None:
        part |= {"token_ids": [token], "logprobs": {"content": [{"logprob": -token / 10}]}}
    return {"choices": [part]}


def test_a_stream_is_joined():
    chunks = [
        {"prompt_token_ids": [1], **chunk(1)},
        chunk(1, 5),
        chunk(0, 4, finish_reason="length", weight_versions=[8]),
        chunk(1, 6, finish_reason="stop", weight_versions=[8, 9]),
        {"choices": []},
    ]
    found = read_answers([join_stream(chunks)], pad_token_id=0)
    assert found["output_ids"].tolist() == [[1, 4, 0], [1, 5, 6]]
    assert found["weight_versions"].tolist() == [[-2, 8, -2], [-2, 8, 9]]
    assert torch.equal(found["logprobs"], torch.tensor([[0, -0.4, 0], [0, -0.5, -0.6]]))
    with pytest.raises(ValueError, match=r"choices\[1\] has no end"):
        join_stream(chunks[:3])


def test_requests_ask_for_what_training_needs():
    asked = asking_for_tokens({"model": "m", "logprobs": False}, is_chat=True)
    assert asked == {"model": "m", "logprobs": True, "return_token_ids": True}
    assert asking_for_tokens({}, is_chat=False)["logprobs"] == 0
    assert asking_for_tokens({"logprobs": 3}, is_chat=False)["logprobs"] == 3
    for key in ("echo", "use_beam_search"):
        with pytest.raises(ValueError, match=f"{key}=True is not served"):
            asking_for_tokens({key: True}, is_chat=False)


def call(app, *, method="POST", path="/v1/chat/completions", key=KEY, body=b"{}", kind="http"):
    """Return the status and the body that a request to the layer gets, and the messages."""
    parts = [
        {"type": "http.request", "body": body[:3], "more_body": True},
        {"type": "http.request", "body": body[3:], "more_body": False},
    ]
    sent = []

    async def receive():
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-length", b"0")]
    scope = {"type": kind, "method": method, "path": path, "headers": headers}
    asyncio.run(TrainableAnswers(app, api_key=KEY, max_request_bytes=99)(scope, receive, send))
    if kind != "http":
        return sent
    return sent[0]["status"], b"".join(each["body"] for each in sent[1:])


async def refused(scope, receive, send):
    raise AssertionError(f"{scope['path']} was passed on")


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"key": "other"}, 401, "API key"),
        ({"key": ""}, 401, "API key"),
        ({"path": "/v1/responses"}, 404, "POST /v1/responses is not served"),
        ({"path": "/v1/load_lora_adapter"}, 404, "is not served"),
        ({"method": "GET"}, 404, "is not served"),
        ({"body": b"a" * 100}, 413, "99 bytes"),
        ({"body": b"[" * 99}, 400, "Expecting value"),
        ({"body": b"[]"}, 400, "expected an object"),
        ({"body": b'{"use_beam_search": true}'}, 400, "beams are not samples"),
    ],
)
def test_what_is_refused_does_not_reach_vllm(request_, status, message):
    found, body = call(refused, **request_)
    assert (found, message in json.loads(body)["error"]["message"]) == (status, True), body
    assert KEY.encode() not in body


def test_web_sockets_are_closed():
    assert call(refused, kind="websocket") == [{"type": "websocket.close", "code": 1008}]


def answering(content_type, parts):
    """Return an app that answers with parts, and samples two choices meanwhile."""

    async def app(scope, receive, send):
        body = (await receive())["body"]
        assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        assert json.loads(body)["return_token_ids"] is True
        answer = answer_in_progress.get()
        assert isinstance(answer, Answer)
        assert (answer.reserve(1), answer.reserve(1)) == (0, 1)
        answer.versions[0], answer.versions[1] = [4, 5], [3]
        headers = [(b"content-type", content_type), (b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for place, part in enumerate(parts, 1):
            more = place < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    return app


def test_an_answer_has_the_versions_of_its_tokens():
    choices = [{"index": 1, "finish_reason": "stop"}, {"index": 0, "finish_reason": "length"}]
    body = json.dumps({"choices": choices}).encode()
    status, found = call(answering(b"application/json", [body[:9], body[9:]]))
    found = json.loads(found)
    assert status == 200
    assert [each["weight_versions"] for each in found["choices"]] == [[3], [4, 5]]
    assert found["weight_version"] == 3


def test_a_stream_has_them_at_the_end_of_each_choice():
    events = [{"choices": [{"index": 0, "finish_reason": end}]} for end in (None, "stop")]
    text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    text += b": still here\n\ndata: [DONE]\n\n"
    # Parts end anywhere.
    parts = [text[:10], text[10:70], text[70:], b""]
    _, found = call(answering(b"text/event-stream; charset=utf-8", parts))
    first, second, *rest = found.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: ")) == events[0]
    assert json.loads(second.removeprefix(b"data: "))["choices"][0]["weight_versions"] == [4, 5]
    assert rest == [b": still here", b"data: [DONE]", b""]


def test_the_key_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "key"
    key = api_key(path)
    assert len(key) > 40
    assert path.stat().st_mode & 0o777 == 0o600
    assert api_key(path) == key
    assert [each.name for each in tmp_path.iterdir()] == ["key"]
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"open to other users \(mode 640\): chmod 600"):
        api_key(path)
    path.chmod(0o600)
    for text in ("", "short", "a" * 20 + "\nb", "ä" * 20):
        path.write_text(text)
        with pytest.raises(ValueError, match="must hold 16 ASCII characters"):
            api_key(path)
    with pytest.raises(ValueError, match="cannot be written: No such file"):
        api_key(tmp_path / "none" / "key")


@pytest.fixture
def with_vllm(monkeypatch):
    """Let the configuration be checked where vLLM is not installed."""
    monkeypatch.setattr("rl_policy.generation.vllm.generation.require_vllm", lambda: None)


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy.model_name=x"], "policy.model_name='x': the model is the command's first"),
        (["serve.max_request_bytes=1"], "serve.max_request_bytes=1: input should be greater"),
        (["serve.other=1"], "serve.other is not a known key"),
        (["policy.generation.vllm_cfg.max_num_seqs=0"], "vllm_cfg.max_num_seqs=0 must be at least"),
        (["--host", "localhost"], "--host 'localhost' must be an IP address"),
        (["--step", "3"], "--step 3: MODEL is no run's directory"),
        (["--port", "PORT"], "--host 127.0.0.1 --port PORT: Address already in use"),
        ([], "RUN_DIR|MODEL='MODEL' is no directory, and no model that loads by its name"),
    ],
)
def test_bad_input_ends_the_command_before_anything_starts(arguments, message, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        own = [each.replace("PORT", port) for each in arguments]
        free = [] if "--port" in own else ["--port", "0"]
        command = ["serve", "MODEL", "--key-file", str(tmp_path / "key"), *free, *own]
        done = CliRunner().invoke(build_app(), command)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert message.replace("PORT", port) in line


@pytest.mark.usefixtures("with_vllm")
def test_a_run_gives_what_its_model_needs_and_not_how_it_was_trained(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "recipe: grpo\n"
        "policy:\n"
        "  precision: bfloat16\n"
        "  max_total_sequence_length: 77\n"
        "  generation: {temperature: 0.3, vllm_cfg: {max_num_seqs: 5}}\n"
    )
    policy = load_serve_config(str(tmp_path)).policy
    assert policy["precision"] == "bfloat16"
    assert policy["generation"]["vllm_cfg"]["max_num_seqs"] == 5
    assert policy["generation"]["temperature"] == 1
    assert "max_total_sequence_length" not in policy
    over = load_serve_config(str(tmp_path), overrides=["policy.precision=float32"])
    assert over.policy["precision"] == "float32"


def test_what_is_served_has_the_version_of_its_checkpoint(tmp_path, monkeypatch):
    """Also of a run that goes on, and writes another one meanwhile."""
    (tmp_path / "config.yaml").write_text("recipe: grpo\n")
    checkpoints = CheckpointManager(RunDirectory(tmp_path).checkpoints, keep_last=2)

    def save(step):
        checkpoints.save(RunState(step=step), lambda checkpoint: None)

    def merge(path, out, *, step):
        save(step + 1)
        merged.append(step)

    merged = []
    monkeypatch.setattr(export, "merge", merge)
    save(4)
    for step, expected in ((None, 4), (None, 5), (6, 6)):
        options = ServeOptions(
            target=str(tmp_path),
            step=step,
            name="mine",
            host="127.0.0.1",
            port=0,
            key_file=tmp_path / "key",
        )
        with _served_model(options) as (_, version):
            assert version == expected == merged.pop()


@pytest.mark.usefixtures("with_vllm")
def test_a_run_without_a_checkpoint_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("recipe: grpo\npolicy: {precision: bfloat16}\n")
    key = ["--key-file", str(tmp_path / "key"), "--port", "0"]
    done = CliRunner().invoke(build_app(), ["serve", str(tmp_path), *key])
    assert done.exit_code == 2, done.output
    assert "has no checkpoint" in done.stderr


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_missing_is_named(tmp_path):
    done = CliRunner().invoke(build_app(), ["serve", "MODEL", "--key-file", str(tmp_path / "key")])
    assert done.exit_code == 2, done.output
    assert 'pip install "rl-policy[vllm]"' in done.stderr
    assert not list(tmp_path.iterdir())
