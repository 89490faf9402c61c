"""The arguments of vLLM's `LLM` and `SamplingParams`, and its environment. No vLLM here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_interfaces.backend.generation import SamplingConfig

    from rl_policy.generation.vllm.config import EngineConfig

# vLLM would take its part of the whole machine, which other processes need as well.
_CPU_CACHE_BYTES = 1 << 30
# What torchrun's environment says of the worker group would mislead vLLM, which has groups of its
# own.
_FOREIGN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ENVIRONMENT = {
    # The engine's core in this process: one process fewer, and a schedule that repeats.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engines and trainers share the cores; binding would put them on the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def engine_arguments(
    config: EngineConfig, *, tokenizer: str, enable_sleep_mode: bool, is_cpu: bool
) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`.

    Args:
        config: How the engine runs.
        tokenizer: The tokenizer's directory.
        enable_sleep_mode: Whether its memory can be given away.
        is_cpu: Whether the device is the CPU.
    """
    cache_bytes = config.kv_cache_memory_bytes
    if cache_bytes is None and is_cpu:
        cache_bytes = _CPU_CACHE_BYTES
    arguments: dict[str, Any] = {
        "model": config.model_name,
        "tokenizer": tokenizer,
        "dtype": config.precision,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else "uni",
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": cache_bytes,
        "enforce_eager": config.enforce_eager,
        "load_format": config.load_format,
        "trust_remote_code": config.trust_remote_code,
        "enable_sleep_mode": enable_sleep_mode,
        # Those of the distribution that was sampled from; vLLM's default ignores the temperature.
        "logprobs_mode": "processed_logprobs",
        # Sampling is the config's alone, whatever the model recommends.
        "generation_config": "vllm",
    }
    if config.weight_transfer:
        arguments["weight_transfer_config"] = {"backend": "rl_refit"}
    return arguments | config.engine_kwargs


def prepare_environment(tensor_parallel_size: int) -> None:
    """Set this process's environment for an engine, before vLLM is imported.

    Args:
        tensor_parallel_size: How many of the visible GPUs, from `LOCAL_RANK` on, are its own.
    """
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if visible:
        first = int(os.environ.get("LOCAL_RANK", "0"))
        own = visible[first : first + tensor_parallel_size]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    for name in _FOREIGN_VARIABLES:
        os.environ.pop(name, None)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def request_arguments(
    sampling: SamplingConfig,
    *,
    prompt_lengths: Sequence[int],
    seeds: Sequence[int],
    stop_strings: Sequence[Sequence[str] | None],
    max_length: int,
    greedy: bool,
) -> list[dict[str, Any]]:
    """Return the arguments of vLLM's `SamplingParams` for each row.

    Example, a row of 3 tokens that may grow to 8, sampled at 0.7:
        {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 5, "seed": 17, ...}

    Args:
        sampling: What holds for every row.
        prompt_lengths: Tokens per prompt, each less than `max_length`.
        seeds: Per row.
        stop_strings: Texts per row, besides the configured ones.
        max_length: Most tokens per row, prompt included.
        greedy: Take the most likely token, whatever `sampling` says.
    """
    shared = _distribution(sampling, greedy=greedy or sampling.temperature == 0) | {
        # 0 alternatives: the sampled token's log-probability alone.
        "logprobs": 0,
        "flat_logprobs": True,
        # The end token is among ours, and a model's own list of further ones is not the contract's.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    rows: list[dict[str, Any]] = []
    for length, seed, texts in zip(prompt_lengths, seeds, stop_strings, strict=True):
        stops = [*sampling.stop_strings, *(texts or ())]
        row = {
            "max_tokens": min(sampling.max_new_tokens, max_length - length),
            "seed": seed,
            "stop": stops,
            "detokenize": bool(stops),
        }
        rows.append(shared | row)
    return rows


def _distribution(sampling: SamplingConfig, *, greedy: bool) -> dict[str, Any]:
    # Greedy rows report the untempered, untruncated distribution, as every backend does.
    if greedy:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
    }
