"""`rl-policy serve-tinker`: from its configuration to a server that runs until a signal ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field
from rl_interfaces.config.resolve import resolve_policy_config
from rl_interfaces.config.schema import MOST

from rl_policy.config import (
    DEFAULT_POLICY,
    ClusterSection,
    Section,
    Settings,
    merge_policy,
    parse_server,
)
from rl_policy.ray.cluster import RayVirtualCluster
from rl_policy.ray.failures import WorkerGroupError
from rl_policy.tinker.store import KEY_PREFIX, CheckpointStore

if TYPE_CHECKING:
    from rl_policy.policy import Policy
    from rl_policy.tinker.engine import ModelLimits
    from rl_policy.tinker.service import TinkerService

KEY_VARIABLE = "TINKER_API_KEY"
"""The environment variable from which the client, and the server, takes the API key."""

SERVER_POLICY: Settings = {
    "dtensor_cfg": {
        "lora": {
            "enabled": True,
            # The client's own default.
            "r": 32,
            # At 32 the best learning rate hardly depends on the rank (Schulman et al. 2025, "LoRA
            # Without Regret").
            "lora_alpha": 32,
            "target_modules": "all-linear",
        }
    },
    # Every call has its own number of tokens and temperature; 1 is what all are scored under.
    "generation": {"max_new_tokens": 1, "temperature": 1.0},
}
"""Over the command line's own defaults of `policy`."""

_MODULES = ("google.protobuf", "starlette", "uvicorn", "peft")
_STOP_S = 5.0
# Most seconds in which clients learn why their requests have failed, before the server ends.
_FAILED_S = 15.0


class TinkerSection(Section):
    """How much a server holds, and for how long."""

    max_models: int = Field(default=16, ge=1, le=MOST)
    """Training clients' models at a time. Each takes host memory: the adapters four times, with
    gradients and optimizer state."""
    max_samplers: int = Field(default=8, ge=1, le=MOST)
    """Sets of adapters that are held for sampling, in host memory. Those that were used least
    recently are dropped; of a checkpoint they are read again when they are needed."""
    max_request_bytes: int = Field(default=64 * 2**20, ge=1024, le=MOST)
    """Most bytes of a request's body."""
    session_timeout_s: float = Field(default=600.0, gt=0, le=MOST)
    """A session whose client has shown no sign of life for so many seconds ends. Clients show one
    every ten seconds."""
    gap_timeout_s: float = Field(default=60.0, gt=0, le=MOST)
    """Most seconds that a request waits for one of a lower number to arrive."""
    result_kept_s: float = Field(default=600.0, gt=0, le=MOST)
    """Seconds that a result is kept after it was sent: the answer may have been lost."""


class ServerConfig(Section):
    """The configuration of a server."""

    cluster: ClusterSection = Field(default_factory=ClusterSection)
    """The devices."""
    policy: Settings = Field(default_factory=dict)
    """The base model and how it is trained, see `PolicyConfig`."""
    tinker: TinkerSection = Field(default_factory=TinkerSection)
    """How much a server holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """The flags of the command."""

    model: str
    name: str
    """Under which clients know the model."""
    host: str
    port: int
    """0: any free one."""
    state_dir: Path


def load_server_config(
    model: str, *, path: Path | None = None, overrides: Sequence[str] = ()
) -> ServerConfig:
    """Return the configuration of a server.

    Args:
        model: The base model's directory or name.
        path: A YAML file.
        overrides: `section.key=value`, over the file.

    Raises:
        ValueError: Names the key and the value.
    """
    config = parse_server(ServerConfig, model=model, path=path, overrides=overrides, base={})
    base = merge_policy(DEFAULT_POLICY, SERVER_POLICY)
    # A server takes what its model takes.
    base.pop("max_total_sequence_length")
    policy = merge_policy(base, config.policy) | {"model_name": model}
    resolved = resolve_policy_config(policy)
    if not (resolved["dtensor_cfg"]["enabled"] and resolved["dtensor_cfg"]["lora"]["enabled"]):
        raise ValueError(
            "a server for tinker trains adapters: policy.dtensor_cfg.enabled and "
            "policy.dtensor_cfg.lora.enabled must be true"
        )
    if resolved["optimizer"]["name"] != "torch.optim.AdamW":
        raise ValueError(
            f"policy.optimizer.name={resolved['optimizer']['name']!r}: tinker's clients step with "
            "AdamW, and set its parameters themselves"
        )
    if resolved["generation"]["temperature"] != 1:
        raise ValueError(
            f"policy.generation.temperature={resolved['generation']['temperature']} would change "
            "the log-probabilities of training: each sampling call has its own temperature"
        )
    return config.model_copy(update={"policy": policy})


def require_extra() -> None:
    """Raise `ValueError` unless what the extra brings is installed."""
    missing = [name for name in _MODULES if not _is_installed(name)]
    if missing:
        raise ValueError(
            f"rl-policy serve-tinker needs {', '.join(missing)}: "
            'install it with: pip install "rl-policy[tinker]"'
        )


def serve(config: ServerConfig, options: ServerOptions, *, tell: Callable[[str], None]) -> int:
    """Run a server until SIGINT or SIGTERM, and return the number of the signal.

    Args:
        config: Of `load_server_config`.
        options: The flags.
        tell: Shows a line.

    Raises:
        ValueError: The server cannot be started with this configuration.
        WorkerGroupError: A process of the policy has died, or all had to be ended.
    """
    from rl_interfaces.backend.checkpoint.hf_files import cannot_be_loaded
    from transformers import AutoTokenizer

    from rl_policy.tinker.engine import TinkerEngine
    from rl_policy.tinker.service import ServiceLimits, TinkerService

    limits = model_limits(config.policy)
    try:
        # transformers gives its factories no types.
        tokenizer: Any = AutoTokenizer.from_pretrained(options.model)  # pyright: ignore[reportUnknownMemberType]
    except OSError as error:
        message = cannot_be_loaded("MODEL", options.model, error, part="a tokenizer")
        raise ValueError(message) from None
    with ExitStack() as leaving:
        store = CheckpointStore(options.state_dir)
        leaving.callback(store.close)
        store.remove_expired()
        api_key = _api_key(store)
        listening = leaving.enter_context(_bound(options.host, options.port))
        policy = leaving.enter_context(_open_policy(config, tokenizer))
        failures: list[Exception] = []
        section = config.tinker
        service = TinkerService(
            TinkerEngine(policy, limits=limits, tokenizer=tokenizer),
            store,
            base_model=options.name,
            tokenizer_id=options.model,
            limits=ServiceLimits(
                max_models=section.max_models,
                max_samplers=section.max_samplers,
                max_sequences=policy.config["generation_batch_size"],
                session_timeout_s=section.session_timeout_s,
                gap_timeout_s=section.gap_timeout_s,
                result_kept_s=section.result_kept_s,
            ),
            is_fatal=lambda error: isinstance(error, WorkerGroupError) or _has_ended(policy),
            on_fatal=failures.append,
        )
        leaving.callback(service.close, _STOP_S)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        if not ipaddress.ip_address(host).is_loopback:
            tell(f"{host} is reachable from other machines, and HTTP is not encrypted")
        if KEY_VARIABLE not in os.environ:
            tell(f"the API key, for clients' {KEY_VARIABLE}, is in {store.root / 'api_key'}")
        # Who reads the next line may connect.
        listening.listen()
        tell(f"serving {options.name} on http://{shown}:{port}")
        number = asyncio.run(
            _run(service, listening, failures, api_key=api_key, limit=section.max_request_bytes)
        )
        for failure in failures:
            if isinstance(failure, WorkerGroupError):
                raise failure
            # Such as memory that ran out on one rank, for which the others could not wait.
            raise WorkerGroupError(f"the ranks were ended: {failure}") from failure
        return number


def model_limits(policy: Mapping[str, Any]) -> ModelLimits:
    """Return what the base model of a section `policy` can take.

    Raises:
        ValueError: The model has no maximum length, and none is set.
    """
    from rl_interfaces.backend.checkpoint.hf_files import cannot_be_loaded
    from transformers import AutoConfig

    from rl_policy.run.inputs import is_missing_directory
    from rl_policy.tinker.engine import ModelLimits

    name = policy["model_name"]
    if is_missing_directory(name):
        raise ValueError(f"MODEL={name!r} is no directory")
    try:
        found: Any = AutoConfig.from_pretrained(name)  # pyright: ignore[reportUnknownMemberType]
    # transformers raises many classes for a file with a wrong type, an unknown key, or no JSON.
    except Exception as error:
        raise ValueError(cannot_be_loaded("MODEL", name, error)) from None
    text: Any = found.get_text_config()
    lengths = [
        policy.get("max_total_sequence_length"),
        getattr(text, "max_position_embeddings", None),
    ]
    known = [length for length in lengths if length is not None]
    if not known:
        raise ValueError(
            f"{name} has no maximum length: set policy.max_total_sequence_length to the tokens "
            "that a sequence may have"
        )
    return ModelLimits(
        vocab_size=text.vocab_size,
        max_tokens=min(known),
        max_rank=resolve_policy_config(policy)["dtensor_cfg"]["lora"]["r"],
    )


async def _run(
    service: TinkerService,
    listening: socket.socket,
    failures: Sequence[Exception],
    *,
    api_key: str,
    limit: int,
) -> int:
    """Serve until a signal, whose number is returned, or until there is a failure."""
    import uvicorn

    from rl_policy.tinker.server import build_app

    failed_at: list[float] = []

    def has_failed() -> bool:
        if not failures:
            return False
        failed_at.append(time.monotonic())
        return service.futures.are_retrieved or failed_at[-1] - failed_at[0] > _FAILED_S

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn would raise them again at its end, before the policy has been shut down.
            yield

        async def on_tick(self, counter: int) -> bool:
            # Ten times a second.
            return has_failed() or await super().on_tick(counter)

    server = Server(
        uvicorn.Config(
            build_app(service, api_key=api_key, max_request_bytes=limit),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=int(_STOP_S),
            server_header=False,
        )
    )
    loop = asyncio.get_running_loop()
    received: list[int] = []
    # A job in a shell's background ignores SIGINT, and goes on to.
    caught = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def end(number: int) -> None:
        received.append(number)
        server.should_exit = True
        # A second signal ends the process at once.
        for each in caught:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in caught:
        loop.add_signal_handler(number, end, number)
    await server.serve(sockets=[listening])
    return received[0] if received else 0


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound, before anything starts that takes long."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"--host {host!r} must be an IP address, such as 127.0.0.1") from None
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except OSError as error:
            raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None
        yield opened


@contextmanager
def _open_policy(config: ServerConfig, tokenizer: Any) -> Iterator[Policy]:
    from rl_policy.policy import Policy

    cluster = RayVirtualCluster(**config.cluster.arguments())
    try:
        policy = Policy(cluster, cast("Any", config.policy), tokenizer, init_reference_model=False)
        try:
            # Raises, before a client does, if the backend cannot.
            assert policy.adapter_sets is not None
            yield policy
        finally:
            policy.shutdown()
    finally:
        cluster.shutdown()


def _api_key(store: CheckpointStore) -> str:
    """Return the key of the environment, or the directory's own.

    Raises:
        ValueError: No client would send it.
    """
    key, source = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
    if key is None:
        key, source = store.api_key(), str(store.root / "api_key")
    if not key.startswith(KEY_PREFIX) or len(key) < 12 or not key.isascii():
        raise ValueError(
            f"{source} must start with {KEY_PREFIX!r}, as the client requires, and "
            f"have 12 characters or more: it has {len(key)}"
        )
    return key


def _has_ended(policy: Policy) -> bool:
    return policy.worker_group is None or policy.worker_group.has_ended


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
