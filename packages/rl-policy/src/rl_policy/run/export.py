"""Models out of a run: the one that it starts from, and those of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from rl_policy.run.directory import RunDirectory, write_directory
from rl_policy.run.session import AnySession, base_model, open_policy


def initial_model(session: AnySession) -> str:
    """Return name or directory of the model that the recipe's own steps start from.

    After a warm-up, that is the model which it has left.
    """
    warmed_up = RunDirectory(session.directory.warm_up).final
    return str(warmed_up) if warmed_up.is_dir() else base_model(session)


def export_checkpoint(session: AnySession, out: Path, *, step: int | None = None) -> int:
    """Write the model of a checkpoint as a directory that `from_pretrained` loads.

    Adapters are merged into the model.

    Args:
        session: The run.
        out: The directory, which is replaced.
        step: Of the checkpoint. None: the newest.

    Returns:
        The step.

    Raises:
        ValueError: There is no such checkpoint; names those that there are.
    """
    checkpoints = session.checkpoints().all()
    if step is not None:
        checkpoints = [each for each in checkpoints if each.state.step == step]
    if not checkpoints:
        steps = [each.state.step for each in session.checkpoints().all()]
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ValueError(f"{session.directory.path} has {wanted}: there are {steps}")
    checkpoint = checkpoints[-1]
    with open_policy(
        session,
        session.config.policy,
        model=initial_model(session),
        has_reference=False,
        is_trained=False,
        checkpoint=checkpoint,
    ) as (policy, _):

        def write(path: Path) -> None:
            policy.save_hf_checkpoint(path)
            session.inputs.tokenizer.save_pretrained(path)

        out.parent.mkdir(parents=True, exist_ok=True)
        write_directory(out, write)
    return checkpoint.state.step
