"""The documentation's page of models, written from the outcomes of a run."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import NamedTuple

Outcomes = Mapping[str, str]

COLUMNS = (
    "log-probabilities",
    "train",
    "export",
    "refit",
    "generate",
    "packing",
    "cp2",
    "tp2",
    "tp2 + sp",
    "LoRA",
    "Megatron",
)
# Parts of what a refusal says that differ between models, and what stands for them.
_OF_ONE_MODEL = [
    (re.compile(r"policy\.model_name='[^']*'"), "policy.model_name"),
    (re.compile(r"is an? '[^']+' model"), "is a model of a type"),
    (re.compile(r"its config \([\w-]+\)"), "its config"),
    (re.compile(r"\b\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration|WithLMHead)\b"), "it"),
    (re.compile(r"\b(?!ValueError)[A-Z]\w+Attention\b"), "it"),
    (re.compile(r"\bby \d[\d.e+-]*"), "by ..."),
    (re.compile(r"(?<=does not run so: ).*?(?=\. Leave the key out)"), "..."),
    (re.compile(r"model\.[\w.]+|\w+\.(?:layers|h)\.[\w.]+"), "..."),
]
_CELL_END = re.compile(r"(?<!\\) \| ")
_NOT_TRIED = "not tried"
_SLOW, _WITHOUT_CACHE = "slow", "equal, without a cache"
# Of what transformers says of a type that it does not build.
_SHORT = 120
_HEAD = """\
# Models

Every causal language model type of transformers, built tiny and random from its own config, and
held against transformers itself: row by row, without padding and without a cache. The page is
written by

    nox -s zoo -- --page docs/pages/models.md

which also tries some types alone, `nox -s zoo -- --types qwen3,gemma2`, and then leaves the other
rows of a page as they are. A cell is `equal`, or the
number of a refusal below: the worker says so and why before it trains, and nothing else happens.

- `log-probabilities`: `get_logprobs` of ragged, padded rows.
- `train`: every weight after one step of gradient descent. Gradients are held to 1e-5, of the
  tensor's largest and of the model's; log-probabilities to 2e-5, of about 4.
- `export`, `refit`: `save_hf_checkpoint`, and what a refit sends, have the names and the bits of
  the checkpoint that was loaded, so that an engine's own loader takes them.
- `generate`: sampled tokens have the log-probabilities that the whole forward gives them. `slow`
  decodes without a cache, as the model's own does not give its own numbers.
- `packing`, `cp2`, `tp2`, `tp2 + sp`: log-probabilities and weights with packed sequences, and on
  two ranks of context parallelism, tensor parallelism, and tensor with sequence parallelism.
- `LoRA`: adapters of `all-linear` train, and transformers reads the same from the merged export.
- `Megatron`: log-probabilities and weights of `rl-megatron-worker`; the other columns are
  `rl-dtensor-worker`.

Norms, biases and correction biases are random, windows are shorter than the rows, and each kind of
layer that a type has occurs.
"""


class Page(NamedTuple):
    """What an earlier run has written."""

    results: dict[str, dict[str, str]]
    """The outcomes of each type; of refusals what they have in common."""
    since: str | None
    """The date of the oldest of them."""


def read(text: str) -> Page:
    """Return what a page says, for a run of some types or columns that leaves the rest as it is."""
    date = re.search(r"^(?:On|From) (\d{4}-\d\d-\d\d)", text, re.MULTILINE)
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))
    results: dict[str, dict[str, str]] = {}
    for name, row in re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE):
        cells = zip(COLUMNS, _CELL_END.split(row), strict=True)
        results[name] = {
            column: _outcome(cell, reasons) for column, cell in cells if cell != _NOT_TRIED
        }
    for name, reason in re.findall(r"^- `([^`]+)`: (\w+Error: .+)$", text, re.MULTILINE):
        results[name] = {"model": f"not built: {_unescaped(reason)}"}
    return Page(results, date.group(1) if date else None)


def write(results: Mapping[str, Outcomes], *, since: str | None = None) -> str:
    """Return the page as Markdown.

    Args:
        results: The outcomes of each type.
        since: The date of the oldest of them. None: all are of now.
    """
    built = {name: found for name, found in sorted(results.items()) if "model" not in found}
    reasons: dict[str, int] = {}
    rows = [
        f"| `{name}` | {' | '.join(_cell(found.get(c, _NOT_TRIED), reasons) for c in COLUMNS)} |"
        for name, found in built.items()
    ]
    parts = [
        _HEAD,
        f"{_when(since)}, in float32 on a CPU: Python "
        f"{platform.python_version()}, torch {version('torch')}, transformers "
        f"{version('transformers')}, megatron-core {version('megatron-core')}.\n",
        "\n".join(_counts(built)) + "\n",
        "\n".join([_line("model type", *COLUMNS), _line(*["---"] * (len(COLUMNS) + 1)), *rows])
        + "\n",
        "## Refusals\n",
        "\n".join(f"{number}. {reason}" for reason, number in reasons.items()) + "\n",
        "## Not built\n",
        "Types that transformers maps to a causal language model, but that do not build small:\n",
        "\n".join(
            f"- `{name}`: {_escaped(found['model'].removeprefix('not built: '))[:_SHORT]}"
            for name, found in sorted(results.items())
            if "model" in found
        )
        + "\n",
    ]
    return "\n".join(parts)


def _when(since: str | None) -> str:
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return f"On {today}" if since in (None, today) else f"From {since} to {today}"


def _counts(built: Mapping[str, Outcomes]) -> list[str]:
    """Return a table of how many types are equal in each column."""
    equal = [sum(found.get(c, "").startswith("equal") for found in built.values()) for c in COLUMNS]
    return [
        _line(f"of {len(built)} types", *COLUMNS),
        _line(*["---"] * (len(COLUMNS) + 1)),
        _line("equal", *(str(count) for count in equal)),
    ]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _reason(outcome: str) -> str:
    """Return what a refusal says of every model that it refuses."""
    said = outcome.removeprefix("refused: ")
    for pattern, replacement in _OF_ONE_MODEL:
        said = pattern.sub(replacement, said)
    return _escaped(said)


def _cell(outcome: str, reasons: dict[str, int]) -> str:
    """Return what stands in a cell; number a reason that is new."""
    if outcome == _WITHOUT_CACHE:
        return _SLOW
    if not outcome.startswith("refused"):
        # Wrong or a crash: never on a page that is committed, and not hidden if it were.
        return _escaped(outcome)
    return str(reasons.setdefault(_reason(outcome), len(reasons) + 1))


def _outcome(cell: str, reasons: Mapping[str, str]) -> str:
    """Return the outcome that a cell stands for."""
    if cell == _SLOW:
        return _WITHOUT_CACHE
    return f"refused: {_unescaped(reasons[cell])}" if cell in reasons else _unescaped(cell)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _unescaped(text: str) -> str:
    return text.replace("\\|", "|").replace("&lt;", "<")
