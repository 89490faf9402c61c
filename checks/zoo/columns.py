"""What each column of the table tries, on the ranks that try it.

The truth is transformers itself, row by row and without padding or a cache: log-probabilities, and
the weights after one step of gradient descent on their mean.
"""

from __future__ import annotations

import logging
import math
import os
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from rl_batched_data import BatchedDataDict, SequencePackingArgs
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.parallel import mesh
from rl_megatron_worker import MegatronPolicyWorker
from rl_policy.losses import NLLLoss
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checks.zoo import types

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Tensors = dict[str, torch.Tensor]

EQUAL = "equal"
_LENGTHS = (11, 7, 3, 9)
_BUDGET = 24
_RATE = 1.0
# Of log-probabilities, which are about 4: float32 sums of about 100 terms in several layers.
_LOGPROB_TOLERANCE = 2e-5
# Of a tensor's gradient, relative to its largest element, and to the largest of all gradients.
_GRADIENT_TOLERANCE = (1e-5, 1e-5)


class Wrong(AssertionError):
    """A worker's numbers are not those of transformers."""


class Truth(NamedTuple):
    """What transformers gives for a model and the rows of `make_batch`."""

    logprobs: torch.Tensor
    """`[batch, seq]` float32."""
    trained: Tensors
    """The weights after one step, by the checkpoint's names."""
    gradient: float
    """The largest gradient."""


def make_batch() -> BatchedDataDict[Any]:
    """Return right-padded rows of unlike lengths; every token but the first is a target."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(_LENGTHS)
    is_token = torch.arange(max(_LENGTHS) + 1) < lengths[:, None]
    tokens = torch.randint(2, types.VOCAB_SIZE, is_token.shape, generator=generator)
    mask = is_token.float()
    mask[:, 0] = 0.0
    columns = {
        "input_ids": torch.where(is_token, tokens, types.PAD),
        "input_lengths": lengths,
        "token_mask": mask,
        "sample_mask": torch.ones(len(_LENGTHS)),
    }
    return BatchedDataDict(columns)


def prepare(directory: str, model_type: str) -> None:
    """Write a model to `directory/model`, and what transformers gives for it to `truth.pt`."""
    root = Path(directory)
    types.build(model_type, root / "model")
    model = load(root / "model")
    batch = make_batch()
    logprobs = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(_LENGTHS):
        logprobs[row, 1:length] = row_logprobs(model, batch["input_ids"][row : row + 1, :length])
    (-logprobs.sum() / batch["token_mask"].sum()).backward()
    largest = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= _RATE * parameter.grad
                largest = max(largest, float(parameter.grad.abs().max()))
    if not (logprobs.isfinite().all() and math.isfinite(largest) and largest > 0):
        raise ValueError("transformers' own results are not finite")
    model.save_pretrained(root / "trained")
    truth = Truth(logprobs.detach(), read(root / "trained"), largest)
    torch.save(truth._asdict(), root / "truth.pt")


def load(path: Path) -> Any:
    """Return transformers' model, in the attention that it takes by itself."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # transformers' sdpa leaves the cap out.
        model.set_attn_implementation("eager")
    return model


def row_logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of all tokens of a row `[1, seq]` but the first."""
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)


def read(directory: Path) -> Tensors:
    """Return every tensor of a checkpoint."""
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


# Columns

_PADDED = ("log-probabilities", "train", "export", "refit", "generate")


def padded(directory: str) -> dict[str, str]:
    """Score, export, send, sample and train padded rows on one rank."""
    root, batch, found = Path(directory), make_batch(), dict[str, str]()
    with reporting(found, *_PADDED), worker_for(root) as worker:
        with reporting(found, "log-probabilities"):
            hold_logprobs(worker, batch, read_truth(root))
        with reporting(found, "refit"):
            hold_weights(sent_by(worker), read(root / "model"))
        with reporting(found, "export"):
            hold_export(worker, root)
        with reporting(found, "generate"), warnings_of("rl_dtensor_worker") as warnings:
            hold_samples(worker, load(root / "model"))
            if any("generates without a cache" in each for each in warnings):
                found["generate"] = f"{EQUAL}, without a cache"
        with reporting(found, "train"):
            hold_training(worker, batch, read_truth(root))
    return found


def in_layout(directory: str, column: str) -> dict[str, str]:
    """Score and train in one of `LAYOUTS`."""
    root, batch, found = Path(directory), make_batch(), dict[str, str]()
    settings = LAYOUTS[column]
    with reporting(found, column), worker_for(root, **settings) as worker:
        order = list(range(len(_LENGTHS)))
        if "sequence_packing" in settings:
            budget: SequencePackingArgs = {"max_tokens_per_microbatch": _BUDGET}
            (batch,), order = batch.shard_by_batch_size(
                1, batch_size=len(_LENGTHS), sequence_packing_args=budget
            )
        truth = read_truth(root)
        hold_logprobs(worker, batch, truth._replace(logprobs=truth.logprobs[order]))
        hold_training(worker, batch, truth)
    return found


def adapted(directory: str) -> dict[str, str]:
    """Train adapters of all linear layers; transformers must read the same from the export."""
    root, batch, found = Path(directory), make_batch(), dict[str, str]()
    lora = {"enabled": True, "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    with reporting(found, "LoRA"), worker_for(root, dtensor_cfg={"lora": lora}) as worker:
        before = worker.get_logprobs(batch)["logprobs"]
        require_close(before, read_truth(root).logprobs, "log-probabilities before training")
        worker.train(batch, NLLLoss())
        logprobs = worker.get_logprobs(batch)["logprobs"]
        if torch.equal(logprobs, before):
            raise Wrong("training changes nothing")
        worker.save_hf_checkpoint(str(root / "merged"))
        model, expected = load(root / "merged"), torch.zeros_like(logprobs)
        for row, length in enumerate(_LENGTHS):
            tokens = batch["input_ids"][row : row + 1, :length]
            expected[row, 1:length] = row_logprobs(model, tokens).detach()
        require_close(logprobs, expected, "log-probabilities of the merged export")
    return found


def megatron(directory: str) -> dict[str, str]:
    """Score and train padded rows on one rank of the Megatron worker."""
    root, batch, found = Path(directory), make_batch(), dict[str, str]()
    optimizer = {"optimizer": "sgd", "lr": _RATE, "weight_decay": 0.0}
    settings = {"megatron_cfg": {"enabled": True, "optimizer": optimizer}}
    config = config_of(root) | settings
    del config["dtensor_cfg"], config["optimizer"]
    with reporting(found, "Megatron"), worker_of(MegatronPolicyWorker, config) as worker:
        hold_logprobs(worker, batch, read_truth(root))
        hold_training(worker, batch, read_truth(root))
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "packing": {
        "sequence_packing": {
            "enabled": True,
            "train_mb_tokens": _BUDGET,
            "logprob_mb_tokens": _BUDGET,
        }
    },
    "cp2": {"dtensor_cfg": {"context_parallel_size": 2}},
    "tp2": {"dtensor_cfg": {"tensor_parallel_size": 2}},
    "tp2 + sp": {"dtensor_cfg": {"tensor_parallel_size": 2, "sequence_parallel": True}},
}
"""Settings beside those of `config_of`, by column."""


class Try(NamedTuple):
    """What one worker tries."""

    num_ranks: int
    function: Callable[..., dict[str, str]]
    """Gets the directory and `arguments`, on every rank."""
    columns: tuple[str, ...]
    """What it returns an outcome of."""
    arguments: tuple[str, ...] = ()


TRIES = {
    "padded": Try(1, padded, _PADDED),
    "packing": Try(1, in_layout, ("packing",), ("packing",)),
    "cp2": Try(2, in_layout, ("cp2",), ("cp2",)),
    "tp2": Try(2, in_layout, ("tp2",), ("tp2",)),
    "tp2 + sp": Try(2, in_layout, ("tp2 + sp",), ("tp2 + sp",)),
    "LoRA": Try(1, adapted, ("LoRA",)),
    "Megatron": Try(1, megatron, ("Megatron",)),
}


# Parts of columns


@contextmanager
def reporting(found: dict[str, str], *columns: str) -> Generator[None]:
    """Note for `columns` what becomes of the body, unless it has noted something itself."""
    try:
        yield
    except Wrong as error:
        outcome = f"wrong: {error}"
    # Only what a worker says before it has done anything is a refusal; see `worker_of`.
    except Refused as error:
        outcome = f"refused: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        outcome = f"crash: {type(error).__name__}: {error} ({place})"
    else:
        outcome = EQUAL
    for column in columns:
        found.setdefault(column, " ".join(outcome.split()))


class Refused(Exception):
    """A worker refuses a model or a setting."""


@contextmanager
def refusing(when: str) -> Generator[None]:
    """Take an error for a refusal if it names a key: any other has not been foreseen."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("policy"):
            raise
        raise Refused(f"{when}{error}") from error


@contextmanager
def worker_of(worker_class: Any, config: dict[str, Any]) -> Generator[Any]:
    """Open a worker.

    Raises:
        Refused: It refuses the config; the message says whether before a process starts.
    """
    with refusing(""):
        worker_class.validate_config(config, world_size=int(os.environ["WORLD_SIZE"]))
    # Sharded layer by layer, as large models are.
    with refusing("at the start: "), mock.patch.object(mesh, "_SMALL_BYTES", 0):
        worker = worker_class(config, types.tokenizer(), init_reference_model=False)
    try:
        yield worker
    finally:
        worker.shutdown()


def worker_for(root: Path, **settings: Any) -> Any:
    """Open a DTensor worker of the model below `root`; see `worker_of`."""
    config = config_of(root)
    for name, section in settings.items():
        config[name] = config.get(name, {}) | section
    return worker_of(DTensorPolicyWorker, config)


def config_of(root: Path) -> dict[str, Any]:
    """Return a policy config in float32 that trains by plain gradient descent."""
    return {
        "model_name": str(root / "model"),
        "precision": "float32",
        "dtensor_cfg": {"enabled": True},
        "train_global_batch_size": len(_LENGTHS),
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_grad_norm": 1e9,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": _RATE}},
        "generation": {"max_new_tokens": 4, "temperature": 1.0},
    }


def read_truth(root: Path) -> Truth:
    """Return what `prepare` has written."""
    return Truth(**torch.load(root / "truth.pt", weights_only=True))


def hold_logprobs(worker: Any, batch: BatchedDataDict[Any], truth: Truth) -> None:
    """Raise unless a worker scores as transformers does."""
    require_close(worker.get_logprobs(batch)["logprobs"], truth.logprobs, "log-probabilities")


def hold_training(worker: Any, batch: BatchedDataDict[Any], truth: Truth) -> None:
    """Raise unless one step gives transformers' weights."""
    before = sent_by(worker)
    worker.train(batch, NLLLoss())
    after = sent_by(worker)
    require_same_names(after, truth.trained)
    relative, absolute = _GRADIENT_TOLERANCE
    for name, expected in truth.trained.items():
        difference = float((after[name] - expected).abs().max())
        own = float((before[name] - expected).abs().max())
        # A step is also rounded to the weight's own precision.
        rounding = 1e-6 * float(expected.abs().max())
        # `not <=` rather than `>`, so that NaN fails.
        if not difference <= relative * own + absolute * truth.gradient + rounding:
            raise Wrong(
                f"the gradient of {name} is off by {difference:.2g}, its largest is {own:.2g}"
            )


def hold_weights(found: Tensors, expected: Tensors) -> None:
    """Raise unless both have the same names and bits."""
    require_same_names(found, expected)
    for name, tensor in expected.items():
        if not torch.equal(found[name], tensor):
            raise Wrong(f"{name} differs")


def hold_export(worker: Any, root: Path) -> None:
    """Raise unless an export has the checkpoint's own names and bits."""
    worker.save_hf_checkpoint(str(root / "exported"))
    hold_weights(read(root / "exported"), read(root / "model"))


def hold_samples(worker: Any, model: Any) -> None:
    """Raise unless sampled tokens have the log-probabilities that the whole forward gives them."""
    batch = make_batch()
    prompts = BatchedDataDict({key: batch[key] for key in ("input_ids", "input_lengths")})
    output = worker.generate(prompts)
    for row, length in enumerate(_LENGTHS):
        total = int(output["unpadded_sequence_lengths"][row])
        tokens = output["output_ids"][row : row + 1, :total]
        with torch.no_grad():
            expected = row_logprobs(model, tokens)[length - 1 :]
        found = output["logprobs"][row, length:total]
        require_close(found, expected, f"samples of a prompt of {length} tokens")


def sent_by(worker: Any) -> Tensors:
    """Return the weights that a refit sends."""
    return {name: tensor.clone() for name, tensor in worker.weight_source}


def require_same_names(found: Tensors, expected: Tensors) -> None:
    """Raise and name a few of the names that only one of both has."""
    more, missing = sorted(found.keys() - expected.keys()), sorted(expected.keys() - found.keys())
    if more or missing:
        raise Wrong(f"{len(more)} other names {more[:2]}, {len(missing)} missing {missing[:2]}")


def require_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise unless log-probabilities are equal up to rounding."""
    difference = float((found - expected).abs().max()) if found.numel() else 0.0
    if not difference <= _LOGPROB_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise Wrong(f"{what} are off by {difference:.2g}")


@contextmanager
def warnings_of(name: str) -> Generator[list[str]]:
    """Collect what a logger warns of."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
