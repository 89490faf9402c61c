"""Print how the product is built: `uv run python -m checks.house`. Run by nobody; holds no limit.

What is counted, of the product modules `packages/*/src/**/*.py`:

- modules, `__init__.py` among them, their lines, and how many of a folder; those under 60 lines
  without `__init__.py`;
- mixins: classes without a constructor of which a class of the product is made beside another base,
  and which nothing constructs. Protocols, exceptions, enumerations, dataclasses, abstract classes
  and named tuples are none;
- the name `Any`, and lines that hold nothing but a comment, in a thousand lines;
- modules that one trained batch enters: those of which a function is called, in the driver or in a
  worker, by the second `Policy.train` over Ray and one rank of the DTensor backend;
- modules that one weight enters: those of which a function is called by the second `send_weights`
  of a DTensor worker to a `RefitReceiver` over shared memory, in one process. What an engine does
  around its receiver (`rl_refit.vllm`, `rl_policy.generation`) is not among them.

Both are of a Qwen2 of two layers. A function that is called while a module is imported does not
count. With `--minutes`, how long `uv run nox` and `.ci/run` take is measured too, in turn in this
checkout.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from checks.workspace import ROOT

SHORT = 60
# Bases by which a class is no mixin.
NO_MIXIN = re.compile(r"Protocol|Error|Exception|Warning|Enum|NamedTuple|TypedDict|ABC|Module")

# Every process of the program imports this before its own code.
TRACER = """
import mmap, os, sys, threading
_FLAG = mmap.mmap(os.open({flag!r}, os.O_RDWR), 1)
_SEEN = set()


def _note(frame, event, argument):
    if event == "call" and _FLAG[0] == 1:
        name = frame.f_code.co_filename
        if name not in _SEEN:
            _SEEN.add(name)
            if "/packages/" in name and "/src/" in name and not _importing(frame):
                with open({entered!r}, "a") as file:
                    file.write(name + "\\n")
            elif "/packages/" in name:
                _SEEN.discard(name)


def _importing(frame):
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


threading.setprofile(_note)
sys.setprofile(_note)
"""

MODEL = """
import os, sys, tempfile
from threading import Thread
import torch
from rl_batched_data import BatchedDataDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
    pad_token="<pad>",
    eos_token="<eos>",
)
path = tempfile.mkdtemp(dir=os.environ["HOUSE_DIRECTORY"])
Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
).save_pretrained(path)
tokenizer.save_pretrained(path)
config = {
    "model_name": path,
    "precision": "float32",
    "dtensor_cfg": {"enabled": True},
    "train_global_batch_size": 2,
    "train_micro_batch_size": 1,
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}},
    "generation": {"max_new_tokens": 4},
}


def record(is_on):
    with open(os.environ["HOUSE_FLAG"], "r+b") as file:
        file.write(bytes([is_on]))
"""

BATCH = """
from rl_policy import Policy, RayVirtualCluster
from rl_policy.losses import NLLLoss

cluster = RayVirtualCluster([1], use_gpus=False)
policy = Policy(cluster, config, tokenizer)
batch = BatchedDataDict(
    {
        "input_ids": torch.randint(2, 64, (2, 8)),
        "input_lengths": torch.tensor([8, 8]),
        "token_mask": torch.ones(2, 8),
        "sample_mask": torch.ones(2),
    }
)
batch["token_mask"][:, 0] = 0
policy.train(batch, NLLLoss())
record(True)
policy.train(batch, NLLLoss())
record(False)
policy.shutdown()
cluster.shutdown()
"""

WEIGHT = """
import socket
from rl_dtensor_worker import DTensorPolicyWorker
from rl_refit import RefitReceiver

with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    port = found.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
worker = DTensorPolicyWorker(config, tokenizer)
address = worker.open_refit(receivers_per_rank=[1], transport="shm")
receiver = RefitReceiver(address, 0)


def refit(version):
    receiver.begin(version)
    receiving = Thread(target=receiver.receive, args=(version, lambda pairs: None))
    receiving.start()
    worker.send_weights(version)
    receiving.join()
    receiver.commit(version)


refit(1)
record(True)
refit(2)
record(False)
receiver.close()
worker.shutdown()
"""


def product_modules() -> list[Path]:
    """Return the paths of all product modules."""
    return sorted(ROOT.glob("packages/*/src/**/*.py"))


def mixins(modules: list[Path]) -> list[str]:
    """Return the names of the classes that only cut another in pieces, with their modules."""
    trees = {path: ast.parse(path.read_text()) for path in modules}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for each in classes for base in each.bases if len(each.bases) > 1}
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    return [
        f"{path.relative_to(ROOT / 'packages')}: {node.name}"
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and node.name in bases
        and node.name not in called
        and not _is_more_than_a_mixin(node)
    ]


def _is_more_than_a_mixin(node: ast.ClassDef) -> bool:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    abstract = any("abstract" in ast.unparse(mark) for m in methods for mark in m.decorator_list)
    constructed = any(method.name == "__init__" for method in methods) or bool(node.decorator_list)
    named = [*map(ast.unparse, node.bases), *(ast.unparse(each.value) for each in node.keywords)]
    return abstract or constructed or any(NO_MIXIN.search(name) for name in named)


def entered_modules(program: str) -> list[str]:
    """Return the product modules that a program's functions enter while it records."""
    with tempfile.TemporaryDirectory(prefix="house-") as directory:
        flag, entered = Path(directory, "flag"), Path(directory, "entered")
        flag.write_bytes(b"\0")
        entered.touch()
        tracer = TRACER.format(flag=str(flag), entered=str(entered))
        Path(directory, "sitecustomize.py").write_text(tracer)
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HOUSE_DIRECTORY": directory,
            "HOUSE_FLAG": str(flag),
            "PYTHONPATH": directory,
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_TMPDIR": directory,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, "-c", MODEL + program]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr, timeout=900)
        found = set(entered.read_text().splitlines())
    return sorted(name.partition("/src/")[2] for name in found)


def print_counts(modules: list[Path]) -> None:
    """Print what reading the modules tells."""
    texts = {path: path.read_text() for path in modules}
    num_lines = {path: len(text.splitlines()) for path, text in texts.items()}
    total = sum(num_lines.values())
    folders = Counter(path.parent for path in modules)
    largest, most = folders.most_common(1)[0]
    short = [path for path in modules if num_lines[path] < SHORT and path.name != "__init__.py"]
    parts = mixins(modules)
    source = "\n".join(texts.values())
    num_any = len(re.findall(r"\bAny\b", source))
    num_comments = len(re.findall(r"^\s*#", source, flags=re.MULTILINE))
    print(f"product modules                {len(modules)}")
    print(f"lines                          {total}")
    print(f"modules per folder, mean       {len(modules) / len(folders):.1f}")
    print(f"modules per folder, largest    {most} ({largest.relative_to(ROOT / 'packages')})")
    print(f"modules under {SHORT} lines         {len(short)}")
    print(f"mixins                         {len(parts)}")
    print(f"Any per thousand lines         {1000 * num_any / total:.1f}")
    print(f"comments per thousand lines    {1000 * num_comments / total:.1f}")
    for name in parts:
        print(f"  mixin {name}")


def minutes_of(command: list[str]) -> float:
    """Return the minutes that a command takes in this checkout.

    Raises:
        subprocess.CalledProcessError: It fails: its time would say nothing.
    """
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, timeout=3600)
    return (time.monotonic() - started) / 60


def main() -> None:
    """Print everything that is counted."""
    parser = argparse.ArgumentParser(description="Print how the product is built.")
    parser.add_argument("--names", action="store_true", help="name the modules that are entered")
    parser.add_argument("--minutes", action="store_true", help="run and time the checks too")
    options = parser.parse_args()
    print_counts(product_modules())
    for what, program in (("batch", BATCH), ("weight", WEIGHT)):
        names = entered_modules(program)
        print(f"modules that a {what} enters".ljust(31) + str(len(names)))
        if options.names:
            print("\n".join(f"  {name}" for name in names))
    if options.minutes:
        for command in (["uv", "run", "nox"], [".ci/run"]):
            print(f"minutes of {' '.join(command)}".ljust(31) + f"{minutes_of(command):.1f}")


if __name__ == "__main__":
    main()
