"""Who holds the device when, where a policy and inference engines share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rl_policy.generation.vllm import VllmGeneration
from rl_policy.policy import Policy
from rl_policy.refit import WeightLink


@contextmanager
def engines_on_device(
    policy: Policy, engines: VllmGeneration, link: WeightLink, *, version: int | None
) -> Iterator[dict[str, float] | None]:
    """Give the device to the engines, which sample inside, and back to the policy.

        policy   train, offload optimizer |              | send | offload model |        | reload
        engines  asleep                   | wake weights | load | wake cache    | sample | sleep

    The engines' weights wake before the refit, into which they are loaded, and their cache after
    it, when the policy has given up its room.

    Args:
        policy: Holds the device before and after.
        engines: Hold it inside.
        link: Hands the weights over.
        version: Of the weights that are handed over. None: the engines sample from what they have.

    Yields:
        The report of the refit, None where there was none.

    Raises:
        RefitError: The refit failed; nothing is lost. The engines sleep and refuse to sample. Enter
            again with the same version to repeat the refit, or call `policy.prepare_for_training`
            to go on without.
        Exception: Engines could not wake, or the policy not make room. The engines sleep. Where
            they have the version already, a note says so: it cannot be sent a second time.
    """
    policy.offload_before_refit()
    report = None
    try:
        engines.prepare_for_generation(tags=["weights"])
        if version is not None:
            report = link.refit(version)
        policy.offload_after_refit()
        engines.prepare_for_generation(tags=["kv_cache"])
    except Exception as error:
        _put_to_sleep(engines, error)
        if report is not None:
            error.add_note(
                f"the engines have taken version {version}: enter again with version=None, or, "
                "where their sleep drops the weights (sleep_level=2), with a newer version"
            )
        raise
    try:
        yield report
    finally:
        engines.finish_generation()
        policy.prepare_for_lp_inference()


def _put_to_sleep(engines: VllmGeneration, error: Exception) -> None:
    """Let engines give the device back after `error`; add to it why they could not."""
    try:
        engines.finish_generation()
    except Exception as theirs:
        error.add_note(f"the engines do not sleep: {type(theirs).__name__}: {theirs}")
