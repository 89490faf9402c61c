"""The environment of an engine's process: variables before vLLM is imported, temporary files."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_refit.private_directory import PrivateDirectory

from rl_policy.backends import BackendNotInstalledError

# torchrun's variables describe the worker group, while vLLM has process groups of its own.
_FOREIGN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ENVIRONMENT = {
    # The engine's core in this process: one process fewer, and a reproducible schedule.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Engines and trainers share the cores; binding would put all of them on the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# In float32 vLLM attends by a Triton kernel, as FlashAttention takes half precision alone, and
# Triton multiplies float32 as TF32, with 10 bits of mantissa, unless it is told otherwise.
_OF_PRECISION = {"float32": {"TRITON_F32_DEFAULT": "ieee"}}


def prepare_environment(tensor_parallel_size: int, *, precision: str) -> None:
    """Set this process's environment for an engine, before vLLM is imported.

    Args:
        tensor_parallel_size: How many of the visible GPUs the engine has, from `LOCAL_RANK` on.
        precision: See `VllmSection`.
    """
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if visible:
        first = int(os.environ.get("LOCAL_RANK", "0"))
        own = visible[first : first + tensor_parallel_size]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    for name in _FOREIGN_VARIABLES:
        os.environ.pop(name, None)
    for name, value in (_ENVIRONMENT | _OF_PRECISION.get(precision, {})).items():
        os.environ.setdefault(name, value)


@contextmanager
def temporary_files_apart() -> Iterator[Path]:
    """Put this process's temporary files, and those of its children, into a directory of their own.

    vLLM's processes meet by files there, which they leave behind if they are killed: the next
    engine that starts then removes the directory. What is compiled stays where that engine looks
    for it.

    Yields:
        The directory.
    """
    # Here, as it imports torch's compiler, which takes a second.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    with PrivateDirectory("rl-policy-vllm-") as directory:
        # Python reads the variable once, and keeps what it has found in `tempdir`.
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory.path)
        try:
            yield directory.path
        finally:
            variable, tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


def require_vllm() -> None:
    """Raise `ImportError`, with the remedy, unless vLLM is installed. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        raise BackendNotInstalledError(
            'The "vllm" generation backend is not installed. '
            'Install it with: pip install "rl-policy[vllm]"'
        )
