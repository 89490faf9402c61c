"""`rl-policy serve`: a model, or a run's checkpoint, on vLLM's server of OpenAI's protocol."""

from __future__ import annotations

import ipaddress
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field
from rl_interfaces.config.resolve import resolve_policy_config
from rl_interfaces.config.schema import MOST
from rl_refit.private_directory import PrivateDirectory

from rl_policy.config import (
    DEFAULT_POLICY,
    ClusterSection,
    Section,
    Settings,
    merge_policy,
    parse_server,
    read_yaml,
)
from rl_policy.generation.state import INITIAL_VERSION
from rl_policy.generation.vllm.config import generation_of_policy
from rl_policy.generation.vllm.serving import MAX_REQUEST_BYTES, ServerSettings, listen
from rl_policy.ray.cluster import RayVirtualCluster
from rl_policy.ray.failures import WorkerGroupError
from rl_policy.run.directory import CheckpointManager, RunDirectory, keep_secret

if TYPE_CHECKING:
    from rl_policy.generation.vllm import VllmGeneration

_DEFAULTS: Settings = {
    # One address. Each engine has one of its own.
    "cluster": {"bundle_ct_per_node_list": [1]},
    # No trainer needs the other half of the device.
    "policy": {"generation": {"vllm_cfg": {"gpu_memory_utilization": 0.9}}},
}
# Of a run's policy: what the model needs, and not what its training did.
_OF_A_RUN = ("precision", "trust_remote_code", "timeout_s")
_ALIVE_S = 2.0
"""Between two looks at the engines."""
_KEY_BYTES = 32
_LEAST_KEY = 16


class ServeSection(Section):
    """How engines serve OpenAI's protocol."""

    chat_template: str | None = None
    """The template of conversations: a file, or the text itself. null: the tokenizer's."""
    tool_call_parser: str | None = None
    """vLLM's parser of the model's tool calls, such as hermes. null: calls stay text."""
    max_request_bytes: int = Field(default=MAX_REQUEST_BYTES, ge=1024, le=MOST)
    """Most bytes of a request's body. A long conversation has some hundred thousand."""


class ServeConfig(Section):
    """The configuration of a server."""

    cluster: ClusterSection = Field(default_factory=ClusterSection)
    """The devices, with an engine on each, or on `tensor_parallel_size` of them."""
    policy: Settings = Field(default_factory=dict)
    """Precision, and `generation.vllm_cfg`; see `PolicyConfig`."""
    serve: ServeSection = Field(default_factory=ServeSection)
    """What is served."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """The flags of the command."""

    target: str
    """A run's directory, or a model's directory or name."""
    step: int | None
    """Of the run's checkpoint. None: the newest."""
    name: str
    """Under which clients know the model."""
    host: str
    port: int
    """0: any free one."""
    key_file: Path


def load_serve_config(
    target: str, *, path: Path | None = None, overrides: Sequence[str] = ()
) -> ServeConfig:
    """Return the configuration of a server.

    Args:
        target: See `ServeOptions`. A run gives the defaults of what its model needs.
        path: A YAML file.
        overrides: `section.key=value`, over the file.

    Raises:
        ValueError: Names the key and the value.
        ImportError: vLLM is not installed.
    """
    from rl_policy.generation.vllm import VllmGeneration
    from rl_policy.run.inputs import is_missing_directory

    if is_missing_directory(target):
        raise ValueError(f"RUN_DIR|MODEL={target!r} is no directory")
    config = parse_server(ServeConfig, model=target, path=path, overrides=overrides, base=_DEFAULTS)
    base = merge_policy(DEFAULT_POLICY, _policy_of_run(target))
    # A server takes what its model takes.
    base.pop("max_total_sequence_length")
    config = config.model_copy(update={"policy": merge_policy(base, config.policy)})
    VllmGeneration.validate_config(_engine_section(config, target))
    return config


def serve(config: ServeConfig, options: ServeOptions, *, tell: Callable[[str], None]) -> None:
    """Serve until an exception, which SIGINT and SIGTERM are, ends it.

    Args:
        config: Of `load_serve_config`.
        options: The flags.
        tell: Shows a line.

    Raises:
        ValueError: What is to be served cannot be; names it.
        WorkerGroupError: An engine has died.
    """
    with ExitStack() as leaving:
        key = api_key(options.key_file)
        # What takes long must not end with a port that is taken.
        _require_free(_require_address(options.host), options.port)
        model, version = leaving.enter_context(_served_model(options))
        engines = leaving.enter_context(_open_engines(config, model, version))
        section = config.serve
        addresses = engines.serve(
            ServerSettings(
                name=options.name,
                api_key=key,
                host=options.host,
                port=options.port,
                chat_template=section.chat_template,
                tool_call_parser=section.tool_call_parser,
                max_request_bytes=section.max_request_bytes,
            )
        )
        if not ipaddress.ip_address(options.host).is_loopback:
            tell(f"{options.host} is reachable from other machines, and HTTP is not encrypted")
        tell(f"the API key is in {options.key_file}")
        for address in addresses:
            tell(f"serving {options.name}, weight version {version}, on {address}")
        while True:
            time.sleep(_ALIVE_S)
            # Of an engine that has died, every call says so.
            if not engines.is_serving():
                raise WorkerGroupError("the server of an engine has ended: its log says why")


def api_key(path: Path) -> str:
    """Return the key in a file of its owner alone, which is made if there is none.

    Raises:
        ValueError: Others can read the file, or it holds no key.
    """
    try:
        key = keep_secret(path, lambda: secrets.token_urlsafe(_KEY_BYTES))
    except OSError as error:
        raise ValueError(f"--key-file {path} cannot be written: {error.strerror}") from None
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(
            f"--key-file {path} is open to other users (mode {status.st_mode & 0o777:o}): "
            "chmod 600 it, or name another"
        )
    if len(key) < _LEAST_KEY or not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"--key-file {path} must hold {_LEAST_KEY} ASCII characters or more: it has {len(key)}"
        )
    return key


def _require_address(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"--host {host!r} must be an IP address, such as 127.0.0.1") from None
    return host


def _require_free(host: str, port: int) -> None:
    try:
        listen(host, port).close()
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror}") from None


def _run_at(target: str) -> RunDirectory | None:
    run = RunDirectory(Path(target))
    return run if run.config.is_file() else None


def _policy_of_run(target: str) -> Settings:
    run = _run_at(target)
    if run is None:
        return {}
    policy: Settings = read_yaml(run.config).get("policy") or {}
    kept = {key: policy[key] for key in _OF_A_RUN if key in policy}
    vllm_cfg = (policy.get("generation") or {}).get("vllm_cfg")
    return kept | ({"generation": {"vllm_cfg": vllm_cfg}} if vllm_cfg else {})


@contextmanager
def _served_model(options: ServeOptions) -> Iterator[tuple[str, int]]:
    """Yield the directory or name of the model, and the version of its weights.

    A checkpoint of a run is written as a model for as long as it is served.
    """
    run = _run_at(options.target)
    if run is None:
        if options.step is not None:
            raise ValueError(f"--step {options.step}: {options.target} is no run's directory")
        yield options.target, INITIAL_VERSION
        return
    from rl_policy.run.export import merge

    step = options.step
    # By its number, as a run that goes on may write another one meanwhile.
    if step is None and (newest := CheckpointManager(run.checkpoints).latest()) is not None:
        step = newest.state.step
    with PrivateDirectory("rl-policy-serve-") as directory:
        out = directory.path / "model"
        merge(run.path, out, step=step)
        assert step is not None, "merge refuses a run without a checkpoint"
        yield str(out), step


@contextmanager
def _open_engines(config: ServeConfig, model: str, version: int) -> Iterator[VllmGeneration]:
    from rl_interfaces.backend.checkpoint.hf_files import cannot_be_loaded
    from transformers import AutoTokenizer

    from rl_policy.generation.vllm import VllmGeneration

    section = _engine_section(config, model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(  # pyright: ignore[reportUnknownMemberType]
            model, trust_remote_code=section["vllm_cfg"]["trust_remote_code"]
        )
    except (OSError, ValueError) as error:
        message = cannot_be_loaded("RUN_DIR|MODEL", model, error, part="a tokenizer")
        raise ValueError(message) from None
    policy = resolve_policy_config(config.policy | {"model_name": model})
    cluster = RayVirtualCluster(**config.cluster.arguments())
    try:
        engines = VllmGeneration(
            cluster,
            cast("Any", section),
            tokenizer,
            seed=policy["seed"],
            timeout_s=policy["timeout_s"],
            weight_version=version,
        )
        try:
            yield engines
        finally:
            engines.shutdown()
    finally:
        cluster.shutdown()


def _engine_section(config: ServeConfig, model: str) -> Settings:
    """Return the `GenerationConfig` of engines that are never refitted, and have their devices."""
    policy = resolve_policy_config(config.policy | {"model_name": model})
    section = generation_of_policy(policy)
    section["vllm_cfg"] = {**section["vllm_cfg"], "weight_transfer": False}
    return {**section, "backend": "vllm", "colocated": {"enabled": False}}
