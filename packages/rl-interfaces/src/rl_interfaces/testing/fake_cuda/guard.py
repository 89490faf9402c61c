"""Compile and load the no-op CUDA backend of `guard.cpp`; nothing here imports torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

_SOURCE = Path(__file__).with_name("guard.cpp")
_COMPILERS = ("c++", "g++", "clang++")
# About 10 s on one core: several times that on a busy machine.
_COMPILE_LIMIT_S = 300
_loaded: list[ctypes.CDLL] = []
# In the order of their dependencies. `libtorch_global_deps` brings the libraries of the build.
_TORCH_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so")


def why_unavailable() -> str | None:
    """Return why no process can load the backend here; None if one can."""
    if not sys.platform.startswith("linux"):
        return f"the fake CUDA device is built on Linux only, this is {sys.platform}"
    if _compiler() is None:
        return f"the fake CUDA device needs a C++ compiler: none of {_COMPILERS} is installed"
    folder = _torch_folder()
    if (folder / "lib" / "libtorch_cuda.so").is_file():
        return "this torch is built with CUDA: the fake device needs a CPU build"
    if not (folder / "include" / "ATen" / "detail" / "CUDAHooksInterface.h").is_file():
        return f"torch's C++ headers are not installed in {folder}"
    return None


def load() -> None:
    """Load the backend into this process, and compile it first if no process has before.

    Call it before anything imports torch: `import torch` asks whether there is CUDA, and remembers.

    Raises:
        RuntimeError: torch is imported already, or `why_unavailable`.
        subprocess.CalledProcessError: It does not compile; the compiler's output is on stderr.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the fake CUDA device must be loaded before torch is imported")
    if reason := why_unavailable():
        raise RuntimeError(reason)
    library = build()
    # It would look for Triton's compiler, and trace stand-ins: functions run as they are written.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name in _TORCH_LIBRARIES:
        ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    _loaded.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))


def is_loaded() -> bool:
    """Return whether this process has loaded the backend."""
    return bool(_loaded)


def build() -> Path:
    """Return the compiled library of this user, source and torch; compiled at the first call."""
    compiler, torch_folder = _compiler(), _torch_folder()
    assert compiler is not None, "why_unavailable has been asked"
    identity = f"{_SOURCE.read_text()}{torch_folder}{_torch_version(torch_folder)}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = _private_cache()
    library = folder / f"{key}.so"
    if library.is_file():
        return library
    # Under another name until it is complete: processes may compile at the same time.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled = Path(scratch) / "guard.so"
        subprocess.run(
            [
                *(compiler, "-std=c++20", "-O0", "-fPIC", "-shared"),
                *("-isystem", str(torch_folder / "include"), str(_SOURCE), "-o", str(compiled)),
                *(f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"),
            ],
            check=True,
            timeout=_COMPILE_LIMIT_S,
        )
        compiled.replace(library)
    return library


def _compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    return Path(spec.origin).parent


def _torch_version(folder: Path) -> str:
    return (folder / "version.py").read_text()


def _private_cache() -> Path:
    """Return a folder that only this user may write to: what is loaded from it is code."""
    folder = Path(tempfile.gettempdir()) / f"rl-interfaces-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(f"{folder} is not a folder that only this user may write to")
    return folder
