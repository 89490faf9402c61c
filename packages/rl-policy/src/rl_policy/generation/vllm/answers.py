"""What makes the answers of vLLM's OpenAI server trainable: a layer of ASGI around it.

    request --key, path, size, settings--> vLLM's app --tokens, log-probabilities--> + versions

An agent's program that speaks the protocol changes nothing: token ids and log-probabilities are
asked for in its name, and each choice of an answer says of which weights its tokens are. vLLM is
not imported here.
"""

from __future__ import annotations

import hmac
import json
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Json = dict[str, Any]

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What else agents ask for. The server has many more paths, whose answers have no token ids, or
# which change its state.
_PASSED_ON = {
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
}
_UNTRAINABLE = {
    "echo": "the prompt is in prompt_token_ids",
    "logprob_token_ids": "it takes the place of the sampled tokens' log-probabilities",
    "use_beam_search": "beams are not samples",
}


@dataclass(slots=True)
class Answer:
    """The versions of the weights that the choices of one answer were sampled from."""

    num_choices: int = 0
    versions: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Of each choice that has ended, a version per token."""

    def reserve(self, num_choices: int) -> int:
        """Return the index of the first of some choices of one prompt."""
        first = self.num_choices
        self.num_choices += num_choices
        return first


answer_in_progress: ContextVar[Answer] = ContextVar("answer_in_progress")
"""What the request that is carried out will be answered with."""


class TrainableAnswers:
    """The app of vLLM's server, with what training needs in its answers.

    Args:
        app: vLLM's.
        api_key: What every request has in its header `Authorization: Bearer`.
        max_request_bytes: Of a body.
    """

    def __init__(self, app: ASGIApp, *, api_key: str, max_request_bytes: int) -> None:
        self._app = app
        self._authorization = f"Bearer {api_key}".encode()
        self._max_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse with an error as OpenAI's clients read it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            await _refuse(send, 401, "the API key is not this server's", kind="authentication")
            return
        method, path = scope["method"], scope["path"]
        trainable = method == "POST" and path in (_CHAT, _COMPLETIONS)
        if not trainable and (method, path) not in _PASSED_ON:
            await _refuse(send, 404, f"{method} {path} is not served")
            return
        body = await self._read(receive)
        if body is None:
            await _refuse(send, 413, f"the body is larger than {self._max_bytes} bytes")
            return
        if trainable:
            await self._sample(body, scope, receive, send)
        else:
            await self._app(scope, _after(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body; None if it is too large."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return body

    async def _sample(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("expected an object")
            asked = json.dumps(asking_for_tokens(request, is_chat=scope["path"] == _CHAT)).encode()
        except (ValueError, RecursionError) as error:
            await _refuse(send, 400, str(error))
            return
        answer = Answer()
        # vLLM's handler runs in this context, or in a copy of it.
        answer_in_progress.set(answer)
        writer = _AnswerWriter(answer, send)
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(asked)).encode()))
        await self._app({**scope, "headers": headers}, _after(asked, receive), writer.send)


def asking_for_tokens(request: Json, *, is_chat: bool) -> Json:
    """Return a request that also asks for token ids and log-probabilities.

    Args:
        request: The body of a client's request.
        is_chat: Whether it is of chat completions.

    Raises:
        ValueError: Nothing that it asks for could be trained on.
    """
    for key, reason in _UNTRAINABLE.items():
        if request.get(key):
            raise ValueError(f"{key}={request[key]!r} is not served: {reason}")
    asked = {**request, "return_token_ids": True}
    if is_chat:
        asked["logprobs"] = True
    elif request.get("logprobs") in (None, False):
        # No alternatives: the log-probability of the sampled token alone.
        asked["logprobs"] = 0
    return asked


def with_versions(part: Json, answer: Answer) -> Json:
    """Return an answer, or a chunk of a stream, with the versions of the choices that end in it.

    Example, a choice of three tokens, the last of which was sampled after a refit to version 5:
        {"choices": [{"index": 0, "token_ids": [7, 8, 9], "finish_reason": "stop", ...}], ...}
        -> {"choices": [{..., "weight_versions": [4, 4, 5]}], ..., "weight_version": 4}
    """
    choices: list[Json] = [*part.get("choices", ())]
    ended: list[int] = []
    for place, choice in enumerate(choices):
        versions = answer.versions.get(choice["index"])
        if choice.get("finish_reason") and versions is not None:
            choices[place] = {**choice, "weight_versions": versions}
            ended += versions
    if not ended:
        return part
    return {**part, "choices": choices, "weight_version": min(ended)}


class _AnswerWriter:
    """Passes an answer on, part by part if it is a stream of events."""

    def __init__(self, answer: Answer, send: Send) -> None:
        self._answer = answer
        self._send = send
        self._start: Message = {}
        self._body = b""
        self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self._start = message
            if self._is_stream:
                await self._send(message)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            is_last = not message.get("more_body", False)
            if self._is_stream:
                await self._send_events(is_last=is_last)
            elif is_last:
                await self._send_whole()
        else:
            await self._send(message)

    async def _send_events(self, *, is_last: bool) -> None:
        *events, self._body = self._body.split(b"\n\n")
        if is_last:
            events.append(self._body)
            body = b"\n\n".join(self._event(event) for event in events)
        else:
            body = b"".join(self._event(event) + b"\n\n" for event in events)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    def _event(self, event: bytes) -> bytes:
        prefix = b"data: "
        if not event.startswith(prefix + b"{"):  # the end, or a comment that keeps it alive
            return event
        part = json.loads(event.removeprefix(prefix))
        return prefix + json.dumps(with_versions(part, self._answer)).encode()

    async def _send_whole(self) -> None:
        body = self._body
        if self._start["status"] == 200:
            body = json.dumps(with_versions(json.loads(body), self._answer)).encode()
        headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _after(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that has the body, and then what the client does."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return parts.pop() if parts else await receive()

    return receive_again


async def _refuse(send: Send, status: int, text: str, *, kind: str = "invalid_request") -> None:
    error = {"message": text, "type": f"{kind}_error", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
