"""vLLM's own OpenAI server on an engine, in the engine's process.

    client --HTTP--> TrainableAnswers --> vLLM's app --generate--> EngineClient
                                                        one turn each |  ^ outputs
                                            RequestLoop: [ step, step, ... ]

vLLM's server expects an `AsyncLLM`, whose scheduler runs in a process of its own. Our engine has it
in its own process, where a refit exchanges weights between two steps, so what the server gets is an
`EngineClient` on the same loop of steps: requests of clients join those of `generate` and `submit`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

from rl_policy.generation.state import EngineState, EngineStateError
from rl_policy.generation.vllm.answers import TrainableAnswers, answer_in_progress
from rl_policy.generation.vllm.engine.running import RequestLoop
from rl_policy.generation.vllm.engine.turns import EngineThread
from rl_policy.generation.vllm.requests import versions_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_START_S = 300.0
_STOP_S = 5.0
MAX_REQUEST_BYTES = 16 * 2**20
"""Of a request's body, if nothing else is said. A long conversation has some hundred thousand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """How engines serve OpenAI's protocol."""

    name: str
    """Under which clients know the model."""
    api_key: str
    """What clients have to send."""
    host: str = "127.0.0.1"
    """The IP address to listen on."""
    port: int = 0
    """Of the first engine, the next ones have the next ports. 0: any free ones."""
    chat_template: str | None = None
    """A file, or the template itself. None: the tokenizer's."""
    tool_call_parser: str | None = None
    """vLLM's parser of the model's tool calls. None: they stay text."""
    max_request_bytes: int = MAX_REQUEST_BYTES
    """Most bytes of a request's body."""


class EngineClient:
    """What vLLM's server calls in place of its own engine.

    Args:
        engine: vLLM's `LLMEngine`.
        thread: Its thread.
        requests: The requests that run in it.
        state: Of the engine.
        adapter: vLLM's `LoRARequest` that every request names; None for none.
        timeout_s: How long a request waits for the engine to be refitted, or to wake.
    """

    is_running = True
    is_stopped = False
    errored = False

    def __init__(
        self,
        engine: Any,
        *,
        thread: EngineThread,
        requests: RequestLoop,
        state: EngineState,
        adapter: Any,
        timeout_s: float,
    ) -> None:
        self.vllm_config = engine.vllm_config
        self.model_config = engine.model_config
        self.renderer = engine.renderer
        self.input_processor = engine.input_processor
        self._engine = engine
        self._thread = thread
        self._requests = requests
        self._state = state
        self._adapter = adapter
        self._timeout_s = timeout_s
        self._names = count()

    @property
    def dead_error(self) -> BaseException:
        """What vLLM raises for an engine that has died: this one takes its server with it."""
        return EngineStateError("the engine has died")

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admit every request: those beyond `max_num_seqs` wait in the scheduler."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can do."""
        return await asyncio.to_thread(self._thread.run, self._engine.get_supported_tasks)

    async def is_tracing_enabled(self) -> bool:
        """Return False."""
        return False

    async def check_health(self) -> None:
        """Do nothing: a process that answers is alive."""

    def generate(
        self, prompt: dict[str, Any], sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs of a request; note the versions of the weights in the answer.

        Args:
            prompt: As vLLM's renderer has made it.
            sampling_params: Of the request.
            request_id: Not used: names that clients choose may repeat.
            options: Not used, they are of adapters, tracing and several engines.
        """
        # Called in the order of the prompts, while the generators start in any.
        first = answer_in_progress.get().reserve(sampling_params.n)
        return self._outputs(prompt, sampling_params, first)

    async def _outputs(
        self, prompt: dict[str, Any], params: Any, first: int
    ) -> AsyncGenerator[Any, None]:
        answer, loop = answer_in_progress.get(), asyncio.get_running_loop()
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        name, gone = f"served-{next(self._names)}", threading.Event()

        def deliver(output: Any) -> None:
            # The server may end during a step, with its loop: the step is of other requests too.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        def add() -> None:
            # In the engine's thread, so that it comes before the cancellation or not at all.
            if not gone.is_set():
                self._add(name, prompt, params, deliver)

        try:
            await self._in_time(add)
            while True:
                output = await outputs.get()
                if isinstance(output, BaseException):
                    raise output
                for each in output.outputs:
                    if each.weight_versions is not None:
                        answer.versions[first + each.index] = versions_of(each.weight_versions)
                yield output
                if output.finished:
                    return
        finally:
            # Of a client that has gone. One that has finished is not there any more.
            gone.set()
            self._thread.post(lambda: self._requests.cancel_stream(name))

    async def _in_time(self, add: Callable[[], None]) -> None:
        """Add a request as soon as the engine samples.

        Raises:
            EngineStateError: It has not been able to in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        may_sample = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # of a loop that has ended, with its server
                loop.call_soon_threadsafe(may_sample.set)

        # From before the attempt on, so that no change between it and the wait is missed.
        with self._requests.waking(wake):
            while True:
                may_sample.clear()
                try:
                    return await asyncio.to_thread(self._thread.run, add)
                except EngineStateError as error:
                    refusal = error
                try:
                    async with asyncio.timeout_at(deadline):
                        await may_sample.wait()
                except TimeoutError:
                    raise refusal from None

    def _add(
        self, name: str, prompt: dict[str, Any], params: Any, deliver: Callable[[Any], None]
    ) -> None:
        self._requests.require_open()
        self._state.require_generate()
        # Prefixes that were computed with other weights must not be found.
        salt = f"{self._state.version}/{prompt.get('cache_salt', '')}"
        internal = self._engine.add_request(
            name, {**prompt, "cache_salt": salt}, params, lora_request=self._adapter
        )
        self._requests.add_stream(name, internal=internal, deliver=deliver)


class ApiServer:
    """vLLM's server in a thread with an event loop of its own.

    Args:
        client: The engine.
        settings: How it serves.
        port: To listen on.

    Raises:
        ValueError: The address cannot be listened on, or vLLM refuses the settings.
    """

    def __init__(self, client: EngineClient, settings: ServerSettings, *, port: int) -> None:
        self._client = client
        self._settings = settings
        try:
            self._socket = listen(settings.host, port)
        except OSError as error:
            raise ValueError(
                f"host={settings.host!r}, port={port}: {error.strerror or error}"
            ) from None
        self._started: Future[None] = Future()
        self._server: Any = None
        self._thread = threading.Thread(target=self._run, name="openai-server", daemon=True)
        self._thread.start()
        try:
            self._started.result(_START_S)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """What clients call `base_url`."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended: by `close`, or by an error, which the log has."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop listening, and give requests in progress some seconds. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(2 * _STOP_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # for the caller, in another thread
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        import uvicorn

        app = await _build_app(self._client, self._settings)
        trainable = TrainableAnswers(
            app,
            api_key=self._settings.api_key,
            max_request_bytes=self._settings.max_request_bytes,
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                trainable,
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=int(_STOP_S),
                server_header=False,
            )
        )
        # The socket accepts connections from here on.
        self._socket.listen()
        self._started.set_result(None)
        await self._server.serve(sockets=[self._socket])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an IP address.

    Raises:
        OSError: The address is none of this machine's, or taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except BaseException:
        opened.close()
        raise
    return opened


async def _build_app(client: EngineClient, settings: ServerSettings) -> ASGIApp:
    """Return the app of vLLM's server, with the state that its handlers read."""
    launchers = "vllm.entrypoints.launchers"
    arguments = import_module(f"{launchers}.cli_args")
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    args = arguments.make_arg_parser(parser).parse_args(["--model", client.model_config.model])
    args.served_model_name = [settings.name]
    args.chat_template = settings.chat_template
    args.tool_call_parser = settings.tool_call_parser
    args.enable_auto_tool_choice = settings.tool_call_parser is not None
    args.disable_log_stats = args.disable_fastapi_docs = True
    tasks = await client.get_supported_tasks()
    import_module(f"{launchers}.launcher").validate_api_server_args(args)
    app = import_module(f"{launchers}.app").build_app(args, tasks, client.model_config)
    state = import_module(f"{launchers}.api_server.app_state")
    await state.init_app_state(client, app.state, args, tasks)
    return app
