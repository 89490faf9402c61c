"""The documentation's page of models, written from the outcomes of a run."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version

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
# Of what transformers says of a type that it does not build.
_SHORT = 120
_HEAD = """\
# Models

Every causal language model type of transformers, built tiny and random from its own config, and
held against transformers itself: row by row, without padding and without a cache. The page is
written by

    nox -s zoo -- --page docs/pages/models.md

which also tries some types alone, `nox -s zoo -- --types qwen3,gemma2`. A cell is `equal`, or the
number of a refusal below: the worker says so and why before it trains, and nothing else happens.

- `log-probabilities`: `get_logprobs` of ragged, padded rows.
- `train`: every weight after one step of gradient descent.
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


def write(results: Mapping[str, Outcomes]) -> str:
    """Return the page as Markdown, from the outcomes of each type."""
    built = {name: found for name, found in sorted(results.items()) if "model" not in found}
    reasons: dict[str, int] = {}
    rows = [
        f"| `{name}` | {' | '.join(_cell(found.get(c, 'not tried'), reasons) for c in COLUMNS)} |"
        for name, found in built.items()
    ]
    parts = [
        _HEAD,
        f"On {datetime.now(UTC):%Y-%m-%d}, in float32 on a CPU: Python "
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
    if outcome == "equal, without a cache":
        return "slow"
    if not outcome.startswith("refused"):
        # Wrong or a crash: never on a page that is committed, and not hidden if it were.
        return _escaped(outcome)
    return str(reasons.setdefault(_reason(outcome), len(reasons) + 1))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
