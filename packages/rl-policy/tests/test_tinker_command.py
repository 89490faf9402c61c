"""`rl-policy serve-tinker` as a process: its start, its end, and what it leaves."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from patience import PATIENCE_S, wait_until
from processes import descendants, is_gone
from recipe_runs import forked_command
from rl_policy.cli import build_app
from rl_policy.tinker import command
from rl_policy.tinker.store import CheckpointStore
from tinker_server import KEY, SETTINGS, build_model
from typer.testing import CliRunner

pytestmark = [
    pytest.mark.needs("rl-policy[tinker]"),
    pytest.mark.usefixtures("ray_apart"),
]

tinker = pytest.importorskip("tinker", reason="the client is no dependency of its server")
types = tinker.types


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("command") / "model")


def start(model, state, log):
    """Return a server's process and address, once it serves."""
    arguments = ["serve-tinker", model, "--name", "tiny", "--port", "0", "--state-dir", str(state)]
    with log.open("w") as file:
        process = subprocess.Popen(
            forked_command(*arguments, *SETTINGS),
            stderr=file,
            stdout=file,
            env={**os.environ, command.KEY_VARIABLE: KEY},
            start_new_session=True,
            # As under a terminal: a job in a shell's background inherits that SIGINT is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def address():
        assert process.poll() is None, log.read_text()
        return re.search(r"on (http://\S+)", log.read_text())

    wait_until(address, what="the address of the server")
    return process, address()[1]


def datum(text="hello"):
    ids = [ord(each) % 250 for each in text]
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def assert_nothing_is_left(process, below, address):
    process.wait(timeout=PATIENCE_S)
    wait_until(lambda: all(map(is_gone, below)), what="the end of all processes")
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect((host, int(port)))


@pytest.mark.slow
def test_a_killed_server_leaves_nothing_and_the_next_one_continues(model, tmp_path):
    state, log = tmp_path / "state", tmp_path / "log"
    process, address = start(model, state, log)
    below = descendants(process.pid)
    assert len(below) > 5
    step = types.AdamParams(learning_rate=0.02)
    try:
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        client.forward_backward([datum()], "cross_entropy").result()
        client.optim_step(step).result()
        path = client.save_state("kept").result().path
        client.forward_backward([datum()], "cross_entropy").result()
        client.optim_step(step).result()
        expected = client.forward([datum()], "cross_entropy").result().metrics
    finally:
        process.kill()
    assert_nothing_is_left(process, below, address)

    process, address = start(model, state, log)
    below = descendants(process.pid)
    try:
        with tinker.ServiceClient(base_url=address, api_key=KEY) as service:
            client = service.create_training_client_from_state_with_optimizer(path).result()
            client.forward_backward([datum()], "cross_entropy").result()
            client.optim_step(step).result()
            assert client.forward([datum()], "cross_entropy").result().metrics == expected
        # A client that waits for a result does not keep the server.
        waiting = tinker.ServiceClient(base_url=address, api_key=KEY)
        waiting.create_lora_training_client("tiny", rank=4).result()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGINT, log.read_text()
    finally:
        process.kill()
    assert_nothing_is_left(process, below, address)
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_server(model, tmp_path):
    process, address = start(model, tmp_path / "state", tmp_path / "log")
    below = descendants(process.pid)
    try:
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        service.create_lora_training_client("tiny", rank=4).result()
        (rank,) = [
            pid for pid in below if b"WorkerHost" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(rank, signal.SIGKILL)
        # The client learns why before the server ends.
        with pytest.raises(tinker.RequestFailedError, match="died during"):
            service.create_lora_training_client("tiny", rank=4).result(timeout=PATIENCE_S)
        assert process.wait(timeout=PATIENCE_S) == 1
    finally:
        process.kill()
    assert_nothing_is_left(process, below, address)
    (line,) = [each for each in (tmp_path / "log").read_text().splitlines() if "error:" in each]
    assert "its process was killed" in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["policy.model_name=x"], "policy.model_name='x': the model is the command's first"),
        (["tinker.max_models=0"], "tinker.max_models=0: input should be greater than or equal"),
        (["tinker.other=1"], "tinker.other is not a known key"),
        (["policy.dtensor_cfg.lora.enabled=false"], "policy.dtensor_cfg.lora.enabled must be true"),
        (["policy.optimizer.name=torch.optim.SGD"], "policy.optimizer.name='torch.optim.SGD'"),
        (["policy.generation.temperature=0.5"], "policy.generation.temperature=0.5 would change"),
    ],
)
def test_bad_settings_are_named(model, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        command.load_server_config(model, overrides=settings)


def test_bad_input_ends_the_command_before_anything_starts(model, tmp_path, monkeypatch):
    monkeypatch.setenv(command.KEY_VARIABLE, KEY)
    state = ["--state-dir", str(tmp_path / "state")]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, message in [
            (
                [model, "--port", str(port)],
                f"--host 127.0.0.1 --port {port}: Address already in use",
            ),
            ([model, "--host", "localhost"], "--host 'localhost' must be an IP address"),
            ([str(tmp_path / "none")], "none' is no directory"),
            ([str(tmp_path)], "cannot be loaded: Unrecognized model"),
            (["nothing"], "MODEL='nothing' is no directory, and no model that loads by its name"),
            ([model, "tinker.max_models=0"], "tinker.max_models=0"),
        ]:
            done = CliRunner().invoke(build_app(), ["serve-tinker", *arguments, *state])
            assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
            assert message in done.stderr
    assert not ray.is_initialized()


def test_keys_that_no_client_sends_are_refused(monkeypatch, tmp_path):
    store = CheckpointStore(tmp_path / "state")
    for key in ("", "secret", "tml-short"):
        monkeypatch.setenv(command.KEY_VARIABLE, key)
        with pytest.raises(ValueError, match="TINKER_API_KEY must start with 'tml-'"):
            command._api_key(store)
    monkeypatch.delenv(command.KEY_VARIABLE)
    assert command._api_key(store) == store.api_key()
    # With an empty key every request would be let in.
    path = store.root / "api_key"
    path.write_text("")
    with pytest.raises(ValueError, match=re.escape(f"{path} must start with 'tml-'")):
        command._api_key(store)
    store.close()


def test_help_loads_neither_torch_nor_the_server():
    code = (
        "import sys; from rl_policy.cli import build_app; build_app();"
        "print([m for m in ('torch', 'ray', 'starlette', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
