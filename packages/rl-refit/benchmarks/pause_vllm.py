"""Measure how long a real vLLM does not answer during a refit: staged, against in place.

Both ways receive the same verified weights from the same sender in another process, over `shm`, and
take turns in one run. In place, the engine does not step from the start of the refit to its end. In
a staged refit requests run: the engine steps while the weights arrive, and stops for the flip.

- seconds: of the whole refit, until the new version serves;
- pause: seconds of it in which the engine could not step;
- steps: of the scheduler, meanwhile; a step takes part of the processors from the refit.

"staged, idle" has no requests: what the refit itself takes, to compare with "in place".

Needs vLLM: `nox -s bench-vllm`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from into_vllm import Engine, run
from report import Row
from rl_refit.vllm import flip, is_staged, stage

SENDER = "near, verified"
NUM_REQUESTS = 4
# Of the engine's 64 positions.
MAX_TOKENS = 56
_POLL_S = 0.001


@dataclass(kw_only=True, slots=True)
class Times:
    """One refit.

    Attributes:
        seconds: Of the refit.
        pause_s: In which the engine could not step.
        steps: Of the scheduler, during the refit.
    """

    seconds: float
    pause_s: float
    steps: int = 0


def refit_in_place(engine: Engine) -> Times:
    """Refit as vLLM's own lifecycle does: the engine waits."""
    start = time.perf_counter()
    engine.refit()
    seconds = time.perf_counter() - start
    return Times(seconds=seconds, pause_s=seconds)


def refit_staged(engine: Engine, *, has_requests: bool) -> Times:
    """Refit beside the weights that serve, stepping through requests until it has arrived."""
    engine.version += 1
    start = time.perf_counter()
    stage(engine.llm, engine.version, place="host")
    engine.pipe.send((engine.current, engine.version))
    steps = 0
    while not is_staged(engine.llm):
        if has_requests:
            _keep_busy(engine)
            engine.llm.llm_engine.step()
            steps += 1
        else:
            time.sleep(_POLL_S)
    stop = time.perf_counter()
    flip(engine.llm, engine.version)
    end = time.perf_counter()
    engine.pipe.recv()
    return Times(seconds=end - start, pause_s=end - stop, steps=steps)


def _keep_busy(engine: Engine) -> None:
    import vllm

    missing = NUM_REQUESTS - engine.llm.llm_engine.get_num_unfinished_requests()
    if missing:
        sampling = vllm.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [1, 2, 3]}] * missing
        engine.llm.enqueue(prompts, sampling, use_tqdm=False)


def measure(directory: str, rounds: int) -> dict[str, list[Times]]:
    """Return the refits of each way, of which the first round does not count."""
    engine = Engine(directory)
    found: dict[str, list[Times]] = {}
    try:
        engine.connect(SENDER)
        for round_ in range(rounds + 1):
            for name, times in (
                ("in place", refit_in_place(engine)),
                ("staged, idle", refit_staged(engine, has_requests=False)),
                ("staged, 4 requests", refit_staged(engine, has_requests=True)),
            ):
                if round_:
                    found.setdefault(name, []).append(times)
            while engine.llm.llm_engine.has_unfinished_requests():
                engine.llm.llm_engine.step()
    finally:
        engine.close()
    return found


def summarise(found: dict[str, list[Times]], num_bytes: int) -> list[Row]:
    """Return medians, and the medians of the ratios within each refit and to the one in place."""
    rows: list[Row] = []
    for name, refits in found.items():
        beside = zip(refits, found["in place"], strict=True)
        rows.append(
            {
                "way": name,
                "seconds": statistics.median(each.seconds for each in refits),
                "GB/s": num_bytes / statistics.median(each.seconds for each in refits) / 1e9,
                "pause s": statistics.median(each.pause_s for each in refits),
                "pause / seconds": statistics.median(e.pause_s / e.seconds for e in refits),
                "largest": max(each.pause_s / each.seconds for each in refits),
                "seconds / in place": statistics.median(a.seconds / b.seconds for a, b in beside),
                "steps": statistics.median(each.steps for each in refits),
            }
        )
    return rows


def main() -> None:
    """Print and write the table."""
    run(
        "pause_vllm",
        "a real vLLM that answers",
        lambda model, rounds, num_bytes: summarise(measure(model, rounds), num_bytes),
        description=__doc__,
    )


if __name__ == "__main__":
    main()
