"""`rl-policy serve` as a process: a run and a model are served, and nothing is left."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S, wait_until
from processes import descendants, is_gone
from recipe_runs import forked_command, write_workplace
from rl_policy.generation.answers import read_answers
from transformers import AutoModelForCausalLM
from vllm_oracles import TOLERANCE, ascii_tokenizer, expected_logprobs, save_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_apart"),
    pytest.mark.needs("rl-policy[all]"),
]
openai = pytest.importorskip("openai", reason="comes with vLLM")


def start(arguments, log):
    """Return a server's process and address, once it serves."""
    with log.open("w") as file:
        process = subprocess.Popen(
            forked_command("serve", *arguments),
            stdout=file,
            stderr=file,
            cwd=log.parent,
            env=os.environ,
            start_new_session=True,
        )

    def served():
        assert process.poll() is None, log.read_text()
        return [line for line in log.read_text().splitlines() if line.startswith("serving ")]

    wait_until(served, what="the address of the server")
    return process, served()[0]


SMALL = [
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.generation.vllm_cfg.kv_cache_memory_bytes=16777216",
    "--port",
    "0",
]


def test_a_run_is_served_and_ends_with_a_signal(tmp_path):
    write_workplace(tmp_path)
    run = tmp_path / "run"
    settings = ["grpo.steps=2", "sft.steps=2", "data.path=problems.jsonl"]
    subprocess.run(
        forked_command("grpo", "--config", "run.yaml", "--out", str(run), *settings),
        cwd=tmp_path,
        check=True,
        timeout=PATIENCE_S,
    )
    log = tmp_path / "log"
    process, line = start([str(run), "--name", "mine", *SMALL], log)
    below = descendants(process.pid)
    try:
        assert line.startswith("serving mine, weight version 2, on http://127.0.0.1:")
        address = line.rpartition(" ")[2]
        key = (tmp_path / "serve-key").read_text()
        with openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client:
            answer = client.completions.create(model="mine", prompt="3?", n=4, max_tokens=4)
        model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32).eval()
        generated = read_answers([answer], pad_token_id=0)
        error = generated["logprobs"] - expected_logprobs(model, generated)
        assert error.abs().max() < TOLERANCE
        assert answer.weight_version == 2
        # A second server does not get as far as to start.
        port = address.rpartition(":")[2].removesuffix("/v1")
        second = subprocess.run(
            forked_command("serve", str(run), *SMALL, "--port", port),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert second.returncode == 2
        assert f"--host 127.0.0.1 --port {port}: Address already in use" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM, log.read_text()
    finally:
        process.kill()
    wait_until(lambda: all(map(is_gone, below)), what="the end of all processes")
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", int(port)))
    assert "Traceback" not in log.read_text()


def test_an_engine_that_dies_ends_the_server(tmp_path):
    save_llama(tmp_path / "model", ascii_tokenizer())
    log = tmp_path / "log"
    process, line = start([str(tmp_path / "model"), *SMALL], log)
    assert f"serving {tmp_path / 'model'}, weight version -1, on http" in line
    below = descendants(process.pid)
    try:
        (engine,) = [
            pid for pid in below if b"WorkerHost" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(engine, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1, log.read_text()
    finally:
        process.kill()
    wait_until(lambda: all(map(is_gone, below)), what="the end of all processes")
    (line,) = [each for each in log.read_text().splitlines() if "error:" in each]
    assert "its process was killed" in line
