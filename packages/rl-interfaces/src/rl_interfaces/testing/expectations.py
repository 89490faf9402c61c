"""Assertions with descriptive messages, independent of pytest's rewriting."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def expect(condition: object, text: str) -> None:
    """Raise an AssertionError with `text` unless `condition` is true."""
    if not condition:
        raise AssertionError(text)


def expect_close(
    found: torch.Tensor,
    expected: torch.Tensor,
    what: str,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> None:
    """Raise unless two float tensors agree, compared in float64; exactly without tolerances.

    Args:
        found: The backend's result.
        expected: The reference.
        what: Names the tensor in the error.
        atol: The largest absolute difference.
        rtol: The largest difference in relation to `expected`.
    """
    torch.testing.assert_close(
        found.detach().cpu().double(),
        expected.detach().cpu().double(),
        atol=atol,
        rtol=rtol,
        msg=lambda text: f"{what}: {text}",
    )


def expect_tensors(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    what: str,
    *,
    atol: float = 0.0,
) -> None:
    """Raise unless two sets of tensors have the same names and agree, see `expect_close`."""
    expect(len(expected) > 0, f"{what}: the reference is empty")
    expect(
        set(found) == set(expected),
        f"{what}: {sorted(set(found) ^ set(expected))} exist on one side only",
    )
    for name, tensor in expected.items():
        expect_close(found[name], tensor, f"{what}, {name}", atol=atol)


def expect_unlike(left: torch.Tensor, right: torch.Tensor, what: str) -> None:
    """Raise if two tensors are equal: a comparison against them could not fail."""
    expect(not torch.equal(left, right), f"{what} are equal: the check would prove nothing")


def expect_error(
    call: Callable[[], object], kind: type[Exception], *, words: tuple[str, ...], what: str
) -> None:
    """Raise unless `call` raises `kind` with a message that contains each of `words`."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        expect(not missing, f"{what}: the error does not name {missing}: {error}")
    else:
        raise AssertionError(f"{what} is accepted, expected {kind.__name__}")
