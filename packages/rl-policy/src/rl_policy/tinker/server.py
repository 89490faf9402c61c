"""The HTTP interface of the server, as version 0.38 of the tinker client calls it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_policy.tinker import requests as bodies
from rl_policy.tinker.requests import RequestError, parse
from rl_policy.tinker.store import WEIGHTS, Checkpoint
from rl_policy.tinker.wire import PROTOBUF, address_of_call

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from rl_policy.tinker.service import Json, TinkerService

logger = logging.getLogger(__name__)

_PREFIX = "/api/v1"
_KEY_HEADER = b"x-api-key"
# The client's own limit is 45.
_POLL_S = 20.0
_SWEEP_S = 10.0
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
    # The policy takes a call at a time: chunks in order need no sorting.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
}
_NO_UNEMBED = (
    "this server has no adapters on the output layer: train_unembed=True trains the other layers"
)

RequestT = TypeVar("RequestT", bound=bodies.Request)
Handler = Callable[["HttpRequest"], Awaitable[Response]]


class BodyTooLargeError(RequestError):
    """A request's body is larger than the server reads."""


class Guard:
    """An ASGI middleware: the API key first, and bodies up to a limit.

    Args:
        app: The application.
        api_key: What every request has in its header `X-API-Key`.
        max_bytes: Of a body.
    """

    def __init__(self, app: ASGIApp, *, api_key: str, max_bytes: int) -> None:
        self._app = app
        self._key = api_key.encode()
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 413, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(_KEY_HEADER, b""), self._key):
            response = _error(401, "the X-API-Key is not this server's: set TINKER_API_KEY")
            await response(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_bytes:
            await self._too_large()(scope, receive, send)
            return
        count = 0

        async def receive_counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._max_bytes:
                raise BodyTooLargeError(self._text)
            return message

        await self._app(scope, receive_counted, send)

    @property
    def _text(self) -> str:
        return f"the body is larger than tinker.max_request_bytes={self._max_bytes}"

    def _too_large(self) -> Response:
        return _error(413, self._text)


def build_app(service: TinkerService, *, api_key: str, max_request_bytes: int) -> ASGIApp:
    """Return the ASGI application of a service."""

    @asynccontextmanager
    async def sweeping(_: Starlette) -> AsyncGenerator[None, None]:
        task = asyncio.create_task(_sweep(service))
        try:
            yield
        finally:
            task.cancel()

    app = Starlette(
        routes=_Routes(service).all(),
        lifespan=sweeping,
        exception_handlers={RequestError: _refused},  # pyright: ignore[reportArgumentType]
    )
    return Guard(app, api_key=api_key, max_bytes=max_request_bytes)


class _Routes:
    def __init__(self, service: TinkerService) -> None:
        self._service = service

    def all(self) -> list[Route]:
        service = self._service
        get = {
            "healthz": lambda _: {"status": "ok"},
            "get_server_capabilities": self._capabilities,
            "samplers/{name}": lambda path: service.describe_sampler(path["name"]),
            "training_runs/{model}": lambda path: self._training_run(path["model"]),
            "training_runs/{model}/checkpoints": self._checkpoints,
            "checkpoints": self._checkpoints,
        }
        routes = [
            Route(f"{_PREFIX}/{path}", _answer(handler), methods=["GET"])
            for path, handler in get.items()
        ]
        posts: dict[str, Handler] = {
            "client/config": self._post(bodies.EmptyRequest, lambda _: _CLIENT_CONFIG),
            "client/dynamic_config": self._post(
                bodies.EmptyRequest, lambda _: {"sample_cancel_enabled": True}
            ),
            "telemetry": self._post(bodies.EmptyRequest, lambda _: {"status": "accepted"}),
            "create_session": self._post(bodies.EmptyRequest, self._create_session),
            "session_heartbeat": self._post(bodies.Heartbeat, self._heartbeat),
            "create_model": self._post(bodies.CreateModel, service.create_model),
            "get_info": self._post(bodies.ByModel, lambda each: service.info(each.model_id)),
            "unload_model": self._post(bodies.ByModel, lambda each: service.unload(each.model_id)),
            "optim_step": self._post_in_order(bodies.OptimStep, service.optim_step),
            "save_weights": self._post_in_order(bodies.SaveWeights, service.save_weights),
            "save_weights_for_sampler": self._post_in_order(
                bodies.SaveForSampler, service.save_for_sampler
            ),
            "load_weights": self._post_in_order(bodies.LoadWeights, service.load_weights),
            "weights_info": self._post(bodies.WeightsInfo, self._weights_info),
            "create_sampling_session": self._post(bodies.CreateSampler, self._create_sampler),
            "join_sampling_session": self._post(bodies.JoinSampler, self._join_sampler),
            "asample": self._post(bodies.Sample, service.sample),
            "cancel_future": self._post(bodies.CancelFuture, self._cancel),
            "sessions/{session}/finish": self._finish,
            "forward_backward": self._forward_backward,
            "retrieve_future": self._retrieve,
        }
        routes += [
            Route(f"{_PREFIX}/{path}", handler, methods=["POST"]) for path, handler in posts.items()
        ]
        checkpoint = f"{_PREFIX}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}"
        routes.append(Route(checkpoint, self._delete, methods=["DELETE"]))
        return routes

    def _post(self, kind: type[RequestT], handle: Callable[[RequestT], Json]) -> Handler:
        async def handler(request: HttpRequest) -> Response:
            return JSONResponse(handle(parse(kind, await request.body())))

        return handler

    def _post_in_order(self, kind: type[RequestT], handle: Callable[[RequestT], Json]) -> Handler:
        """Return the handler of a request that has a number among those of its model."""

        async def handler(request: HttpRequest) -> Response:
            body = await request.body()
            try:
                parsed = parse(kind, body)
            except RequestError:
                # The requests after it must not wait for this one.
                with suppress(RequestError):
                    numbered = parse(bodies.NumberAlone, body)
                    self._service.refuse(numbered.model_id, numbered.seq_id)
                raise
            return JSONResponse(handle(parsed))

        return handler

    # Sessions

    def _create_session(self, _: bodies.EmptyRequest) -> Json:
        return {
            "type": "create_session",
            "session_id": self._service.create_session(),
            "info_message": _NO_UNEMBED,
        }

    def _heartbeat(self, request: bodies.Heartbeat) -> Json:
        self._service.touch(request.session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, request: HttpRequest) -> Response:
        self._service.end_session(request.path_params["session"])
        return Response(status_code=204)

    def _capabilities(self, _: dict[str, str]) -> Json:
        model = {
            "model_name": self._service.base_model,
            "max_context_length": self._service.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    # Training and sampling

    async def _forward_backward(self, request: HttpRequest) -> Response:
        model, number, message = address_of_call(await request.body())
        return JSONResponse(self._service.forward_backward(model, number, message))

    def _create_sampler(self, request: bodies.CreateSampler) -> Json:
        sampler = self._service.create_sampler(request)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def _join_sampler(self, request: bodies.JoinSampler) -> Json:
        number = self._service.join_sampler(request.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": number}

    def _cancel(self, request: bodies.CancelFuture) -> Json:
        future = self._service.futures.get(request.request_id)
        if future is not None:
            future.cancel()
        return {}

    async def _retrieve(self, request: HttpRequest) -> Response:
        """Answer with a result, an error, or that it is not there yet."""
        name = parse(bodies.RetrieveFuture, await request.body()).request_id
        futures = self._service.futures
        future = futures.get(name)
        if future is None:
            return _error(404, f"request_id={name!r} is unknown, or was forgotten")
        # Not `wait_for`, which cancels what it waits for.
        await asyncio.wait([future], timeout=_POLL_S)
        if not future.done():
            pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(pending)
        futures.note_retrieved(name)
        if future.cancelled():
            return _failed(f"request {name} was cancelled", "user")
        error = future.exception()
        if error is not None:
            is_users = isinstance(error, ValueError)
            if not is_users:
                logger.error("request %s failed", name, exc_info=error)
            return _failed(" ".join(str(error).split()), "user" if is_users else "server")
        result = future.result()
        if isinstance(result, bytes):
            return Response(result, media_type=PROTOBUF)
        return JSONResponse(result)

    # Checkpoints

    def _weights_info(self, request: bodies.WeightsInfo) -> Json:
        checkpoint, _ = self._service.store.find(request.tinker_path)
        return {
            "base_model": checkpoint.base_model,
            "is_lora": True,
            "lora_rank": checkpoint.rank,
            "train_unembed": False,
            "train_mlp": "mlp" in checkpoint.layers,
            "train_attn": "attention" in checkpoint.layers,
        }

    def _checkpoints(self, path: dict[str, str]) -> Json:
        found = self._service.store.all_of(path.get("model"))
        return {"checkpoints": [_describe(each) for each in found]}

    def _training_run(self, model: str) -> Json:
        found = self._service.store.all_of(model)
        if not found:
            raise RequestError(f"training run {model!r} has no checkpoint")
        newest = {each.kind: _describe(each) for each in found}
        return {
            "training_run_id": model,
            "base_model": self._service.base_model,
            "model_owner": "server",
            "is_lora": True,
            "lora_rank": found[-1].rank,
            "last_request_time": _time(found[-1].created),
            "last_checkpoint": newest.get(WEIGHTS),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
        }

    async def _delete(self, request: HttpRequest) -> Response:
        parts = request.path_params
        self._service.store.remove(f"tinker://{parts['model']}/{parts['kind']}/{parts['name']}")
        return Response(status_code=204)


def _answer(handle: Callable[[dict[str, Any]], Json]) -> Handler:
    async def handler(request: HttpRequest) -> Response:
        return JSONResponse(handle(request.path_params))

    return handler


def _describe(checkpoint: Checkpoint) -> Json:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": "training" if checkpoint.kind == WEIGHTS else "sampler",
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat()


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text, "detail": text}, status_code=status)


async def _refused(_: HttpRequest, error: Exception) -> Response:
    return _error(413 if isinstance(error, BodyTooLargeError) else 422, str(error))


def _failed(text: str, category: str) -> Response:
    return Response(
        json.dumps({"error": text, "category": category}), media_type="application/json"
    )


async def _sweep(service: TinkerService) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        service.sweep()
