"""OpenAI's protocol of chat completions, for the agents in one process.

Each conversation has a key of its own, which tells whose a request is. An answer is a text.
"""

from __future__ import annotations

import hmac
import json
import logging
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, cast

from rl_policy.data.messages import Message

_LOGGER = logging.getLogger(__name__)

MODEL = "policy"
"""Under which agents know the model, whatever it is."""

_MAX_BODY_BYTES = 16 * 2**20
_KEY_BYTES = 16
# Of reading a request; an answer takes as long as the policy does.
_READ_LIMIT_S = 60
# Sampling is the run's, so that what is trained was sampled from the policy.
_OF_THE_RUN = frozenset(
    (
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("max_tokens", "max_completion_tokens", "stop", "seed", "reasoning_effort"),
    )
)
_TAKEN = frozenset(("model", "messages", "stream", "n", "user", "metadata", "store"))


# Shared by the processes that are forked from this one: what is said once is said in one of them.
_HAS_WARNED = mmap.mmap(-1, 1)


class RequestError(Exception):
    """A request that the endpoint does not answer, and why."""


class Conversation(Protocol):
    """What answers the requests of one key."""

    def ask(self, messages: list[Message]) -> str:
        """Return the answer to a request; called in a thread of its own.

        Raises:
            RequestError: There is none.
        """
        ...


class Endpoint(ThreadingHTTPServer):
    """An HTTP server on the loopback interface, which serves in a thread until its process ends."""

    daemon_threads = True
    # Agents of a large group connect at once, and a full queue costs each a second.
    request_queue_size = 1024

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._conversations: dict[str, Conversation] = {}
        threading.Thread(target=self.serve_forever, name="agents", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a request has raised; a client that did not wait for its answer is no error."""
        is_left = isinstance(sys.exception(), ConnectionError)
        level = logging.DEBUG if is_left else logging.ERROR
        _LOGGER.log(level, "a request from %s has failed", client_address, exc_info=True)

    @property
    def base_url(self) -> str:
        """What clients call `base_url`."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def add(self, conversation: Conversation) -> str:
        """Return a key whose requests a conversation answers."""
        key = secrets.token_urlsafe(_KEY_BYTES)
        self._conversations[key] = conversation
        return key

    def remove(self, key: str) -> None:
        """Answer requests of a key no more."""
        self._conversations.pop(key, None)

    def conversation(self, authorization: str) -> Conversation | None:
        """Return the conversation of a request's header."""
        given = authorization.removeprefix("Bearer ").encode()
        for key, conversation in list(self._conversations.items()):
            if hmac.compare_digest(key.encode(), given):
                return conversation
        return None


def own_endpoint() -> Endpoint:
    """Return the endpoint of this process: the threads of another are not in a fork."""
    return _endpoint_of(os.getpid())


@cache
def _endpoint_of(_: int) -> Endpoint:
    return Endpoint()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _READ_LIMIT_S

    def do_GET(self) -> None:
        self._serve(self._list_models)

    def do_POST(self) -> None:
        self._serve(self._complete)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a request is a turn, and a step has thousands."""

    def _serve(self, serve: Callable[[Conversation, bytes], None]) -> None:
        conversation = cast("Endpoint", self.server).conversation(
            self.headers.get("Authorization", "")
        )
        length = self.headers.get("Content-Length") or "0"
        if conversation is None or not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            # What is not read would be taken for the next request.
            self.close_connection = True
            if conversation is None:
                self._refuse(401, "the api_key is of no episode in progress")
            else:
                self._refuse(413, f"a body has at most {_MAX_BODY_BYTES} bytes, not {length:.20}")
            return
        try:
            serve(conversation, self.rfile.read(int(length)))
        except RequestError as error:
            self._refuse(400, str(error))

    def _list_models(self, _: Conversation, __: bytes) -> None:
        if self.path != "/v1/models":
            raise RequestError(f"GET {self.path}: there is /v1/models")
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rl-policy"}
        self._send(200, json.dumps({"object": "list", "data": [model]}))

    def _complete(self, conversation: Conversation, body: bytes) -> None:
        if self.path != "/v1/chat/completions":
            raise RequestError(f"POST {self.path}: there is /v1/chat/completions")
        messages, is_stream = read_request(body)
        text = conversation.ask(messages)
        if is_stream:
            self._send(200, stream_of(text), kind="text/event-stream")
        else:
            self._send(200, json.dumps(completion_of(text)))

    def _refuse(self, status: int, text: str) -> None:
        error = {"message": text, "type": "invalid_request_error", "code": status}
        self._send(status, json.dumps({"error": error}))

    def _send(self, status: int, text: str, *, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def read_request(body: bytes) -> tuple[list[Message], bool]:
    """Return the messages of a request for a chat completion, and whether it asks for a stream.

    Raises:
        RequestError: It is none, or asks for what a turn cannot be; names it.
    """
    try:
        request: Any = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise RequestError("the body must be an object with a list of messages")
    given = {key for key, value in request.items() if value is not None}
    if request.get("model") != MODEL:
        raise RequestError(f"model={request.get('model')!r}: the endpoint has {MODEL!r} alone")
    if request.get("n") not in (None, 1):
        raise RequestError(f"n={request['n']!r}: an episode has one answer to a request")
    if refused := sorted(given - _TAKEN - _OF_THE_RUN):
        raise RequestError(f"{', '.join(refused)}: the endpoint answers messages by texts alone")
    if ignored := sorted(given & _OF_THE_RUN):
        _warn_of(ignored)
    messages = [_message(index, each) for index, each in enumerate(request["messages"])]
    return messages, bool(request.get("stream"))


def _warn_of(ignored: Sequence[str]) -> None:
    if not _HAS_WARNED[0]:
        _HAS_WARNED[0] = 1
        _LOGGER.warning(
            "an agent sets %s: turns are sampled as policy.generation says", ", ".join(ignored)
        )


def _message(index: int, message: Any) -> Message:
    """Return a message with its keys that are not null, and its content as a text.

    Raises:
        RequestError: It has no text, or has calls of tools.
    """
    place = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{place} must be an object with a role")
    if message.get("tool_calls") or message.get("function_call"):
        raise RequestError(f"{place}.tool_calls: calls of tools are texts here")
    content: Any = message.get("content")
    if isinstance(content, list):
        parts = [each for each in content if isinstance(each, dict) and each.get("type") == "text"]
        if len(parts) != len(content):
            raise RequestError(f"{place}.content has parts that are no text")
        content = "".join(str(each.get("text")) for each in parts)
    if not isinstance(content, str):
        raise RequestError(f"{place}.content must be a text")
    kept = {key: value for key, value in message.items() if value is not None}
    return {**kept, "content": content}


def completion_of(text: str) -> dict[str, Any]:
    """Return the chat completion of an answer.

    `usage` is left out: the tokens are counted by the run.
    """
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {**_envelope("chat.completion"), "choices": [choice]}


def stream_of(text: str) -> str:
    """Return the events of a stream whose first chunk has the whole answer."""
    envelope = _envelope("chat.completion.chunk")
    deltas = [({"role": "assistant", "content": text}, None), ({}, "stop")]
    chunks = [
        {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in deltas
    ]
    return "".join(f"data: {data}\n\n" for data in [*map(json.dumps, chunks), "[DONE]"])


def _envelope(kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(8)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": MODEL}
