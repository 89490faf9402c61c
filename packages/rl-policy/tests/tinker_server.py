"""A server for the tinker client in this process, on the tests' Ray."""

import asyncio
import threading
from contextlib import contextmanager
from pathlib import Path

from patience import PATIENCE_S
from rl_policy.config import TinyModelSection
from rl_policy.data.tiny_model import build_tiny_model, build_tokenizer, tiny_model_config
from rl_policy.tinker import command
from rl_policy.tinker.engine import TinkerEngine
from rl_policy.tinker.server import build_app
from rl_policy.tinker.service import ServiceLimits, TinkerService
from rl_policy.tinker.store import CheckpointStore

KEY = "tml-test-of-a-server"
NAME = "tiny"
MAX_RANK, ALPHA = 8, 16
MAX_BYTES = 100_000
SETTINGS = [
    "cluster.bundle_ct_per_node_list=[1]",
    f"policy.dtensor_cfg.lora.r={MAX_RANK}",
    f"policy.dtensor_cfg.lora.lora_alpha={ALPHA}",
    "policy.train_micro_batch_size=8",
    "policy.logprob_batch_size=8",
]
LIMITS = ServiceLimits(
    max_models=6,
    max_samplers=2,
    max_sequences=32,
    session_timeout_s=600,
    gap_timeout_s=1,
    result_kept_s=600,
)


def build_model(path):
    """Write the base model, which has room for 64 tokens."""
    sizes = TinyModelSection(initializer_range=0.1)
    build_tiny_model(path, config=tiny_model_config(sizes, max_sequence_length=64), seed=0)
    return str(path)


@contextmanager
def running_server(model, state):
    """Yield the address of a server."""
    import uvicorn

    config = command.load_server_config(model, overrides=SETTINGS)
    failures = []
    with (
        command._open_policy(config, build_tokenizer()) as policy,
        command._bound("127.0.0.1", 0) as listening,
    ):
        store = CheckpointStore(Path(state))
        service = TinkerService(
            TinkerEngine(
                policy, limits=command.model_limits(config.policy), tokenizer=build_tokenizer()
            ),
            store,
            base_model=NAME,
            tokenizer_id=model,
            limits=LIMITS,
            is_fatal=lambda error: False,
            on_fatal=failures.append,
        )
        app = build_app(service, api_key=KEY, max_request_bytes=MAX_BYTES)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True
        )
        thread.start()
        listening.listen()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            service.close(5)
            store.close()
    assert not failures
