"""The distillation loss: against hand-computed numbers, torch's divergences and TRL's."""

import json
from math import log
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rl_policy.losses import DistillationLoss
from tolerances import ELEMENTWISE, REPEATED

TRL = json.loads((Path(__file__).parent / "trl_losses.json").read_text())["gkd"]
TOLERANCE = {"rtol": 4 * REPEATED, "atol": ELEMENTWISE}


def batch_of(teacher, *, k, token_mask):
    """Return a batch with the `k` largest of a teacher's logits `[batch, seq, vocab]`."""
    values, indices = teacher.topk(k, dim=-1)
    return {
        "topk_logits": values,
        "topk_indices": indices,
        "token_mask": token_mask,
        "sample_mask": torch.ones(len(teacher)),
    }


def kl(p, q):
    return torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)


def evaluate(loss, logits, batch):
    num_tokens = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum()
    value, metrics = loss(logits, batch, batch["sample_mask"].sum(), num_tokens)
    return value, {name: number.item() for name, number in metrics.items()}


def one_token(student, teacher, *, k):
    """Return logits and batch of one target token, from probabilities of a vocabulary."""
    rows = [torch.tensor([[p, p]]).log() for p in (student, teacher)]
    batch = batch_of(rows[1], k=k, token_mask=torch.tensor([[0, 1]]))
    return rows[0].requires_grad_(), batch


@pytest.mark.parametrize(
    ("options", "k", "expected"),
    [
        # The whole vocabulary.
        ({"beta": 0.0}, 2, 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)),
        ({"beta": 1.0}, 2, 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)),
        (
            # The mixture is (0.6, 0.4).
            {"beta": 0.4},
            2,
            0.4 * (0.75 * log(0.75 / 0.6) + 0.25 * log(0.25 / 0.4))
            + 0.6 * (0.5 * log(0.5 / 0.6) + 0.5 * log(0.5 / 0.4)),
        ),
        # The teacher has one token, of probability 1; the student gives half to another.
        ({"beta": 0.0}, 1, log(1 / 0.5)),
        (
            # The mixture is (0.4 + 0.6 * 0.5, 0.6 * 0.5).
            {"beta": 0.4},
            1,
            0.4 * log(1 / 0.7) + 0.6 * (0.5 * log(0.5 / 0.7) + 0.5 * log(0.5 / 0.3)),
        ),
        # Nothing is left to compare.
        ({"beta": 0.4, "truncates_student": True}, 1, 0.0),
    ],
)
def test_one_token_against_hand_computed_numbers(options, k, expected):
    logits, batch = one_token((0.5, 0.5), (0.75, 0.25), k=k)
    value, _ = evaluate(DistillationLoss(**options), logits, batch)
    assert value.item() == pytest.approx(expected, abs=ELEMENTWISE)


@pytest.mark.parametrize("case", TRL, ids=lambda case: f"beta={case['beta']}")
def test_loss_and_gradient_are_those_of_trl(case):
    mask = torch.tensor(case["is_target"])
    student, teacher = (
        # The last position predicts nothing here.
        F.pad(torch.tensor(case[name]).view(*mask.shape, -1), (0, 0, 0, 1))
        for name in ("student", "teacher")
    )
    student.requires_grad_()
    batch = batch_of(teacher, k=student.shape[-1], token_mask=F.pad(mask, (1, 0)))
    value, _ = evaluate(DistillationLoss(beta=case["beta"]), student, batch)
    value.backward()
    assert value.item() == pytest.approx(case["loss"], rel=4 * REPEATED)
    gradient = torch.tensor(case["gradient"]).view(*mask.shape, -1)
    torch.testing.assert_close(student.grad[:, :-1], gradient, **TOLERANCE)
    assert not student.grad[:, -1].any()


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("truncates", [False, True])
def test_truncated_distributions_against_whole_ones_in_float64(beta, truncates):
    generator = torch.Generator().manual_seed(3)
    student, teacher = (2 * torch.randn(3, 5, 11, generator=generator) for _ in range(2))
    mask = torch.randint(0, 2, (3, 5), generator=generator)
    batch = batch_of(teacher, k=4, token_mask=mask)
    loss = DistillationLoss(beta=beta, truncates_student=truncates)
    if beta == 1 and not truncates:
        with pytest.raises(ValueError, match="beta=1 is infinite with k=4 of 11 tokens"):
            evaluate(loss, student, batch)
        return
    is_known = torch.zeros_like(teacher, dtype=torch.bool).scatter(
        -1, batch["topk_indices"], value=True
    )
    t = teacher.double().where(is_known, -torch.inf).softmax(-1)
    s = student.double().where(is_known | (not truncates), -torch.inf).softmax(-1)
    if beta in (0, 1):
        expected = kl(t, s) if beta == 0 else kl(s, t)
    else:
        mixture = beta * t + (1 - beta) * s
        expected = beta * kl(t, mixture) + (1 - beta) * kl(s, mixture)
    expected = (expected[:, :-1] * mask[:, 1:]).sum() / mask[:, 1:].sum()
    value, metrics = evaluate(loss, student, batch)
    assert value.item() == pytest.approx(expected.item(), rel=4 * REPEATED)
    whole = student.double().softmax(-1)
    coverage = ((whole * is_known).sum(-1)[:, :-1] * mask[:, 1:]).sum() / mask[:, 1:].sum()
    assert metrics["teacher_coverage"] == pytest.approx(coverage.item(), rel=4 * REPEATED)
    same = (student.argmax(-1) == teacher.argmax(-1)).double()
    agreement = (same[:, :-1] * mask[:, 1:]).sum() / mask[:, 1:].sum()
    assert metrics["teacher_agreement"] == pytest.approx(agreement.item(), rel=4 * REPEATED)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_tokens_that_the_student_lacks_have_no_part(beta, truncates):
    """Models of one family pad the same vocabulary to different sizes."""
    generator = torch.Generator().manual_seed(4)
    student = torch.randn(3, 5, 9, generator=generator, requires_grad=True)
    teacher = torch.randn(3, 5, 12, generator=generator)
    teacher[..., 9:] += 1
    mask = torch.ones(3, 5, dtype=torch.int64)
    batch = batch_of(teacher, k=12, token_mask=mask)
    loss = DistillationLoss(beta=beta, truncates_student=truncates)
    value, metrics = evaluate(loss, student, batch)
    value.backward()
    # Of what both have, k is the vocabulary.
    wanted = student.detach().requires_grad_()
    same = batch_of(teacher[..., :9], k=9, token_mask=mask)
    expected, _ = evaluate(DistillationLoss(beta=beta), wanted, same)
    expected.backward()
    torch.testing.assert_close(value, expected, **TOLERANCE)
    torch.testing.assert_close(student.grad, wanted.grad, **TOLERANCE)
    assert metrics["teacher_coverage"] == pytest.approx(1, rel=4 * REPEATED)


def test_padding_has_no_part():
    logits, batch = one_token((0.5, 0.5), (0.75, 0.25), k=2)
    padded = F.pad(logits.detach(), (0, 0, 0, 3)).requires_grad_()
    longer = {
        "topk_logits": F.pad(batch["topk_logits"], (0, 0, 0, 3)),
        "topk_indices": F.pad(batch["topk_indices"], (0, 0, 0, 3)),
        "token_mask": F.pad(batch["token_mask"], (0, 3)),
        "sample_mask": batch["sample_mask"],
    }
    loss = DistillationLoss(beta=0.3)
    value, _ = evaluate(loss, padded, longer)
    value.backward()
    assert value.item() == evaluate(loss, logits, batch)[0].item()
    assert padded.grad.isfinite().all()
    assert not padded.grad[:, 1:].any()


def test_an_equal_student_costs_nothing_and_another_learns():
    teacher = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    batch = batch_of(teacher, k=8, token_mask=torch.ones(1, 4))
    for beta in (0.0, 0.5, 1.0):
        loss = DistillationLoss(beta=beta)
        assert evaluate(loss, teacher, batch)[0].item() == pytest.approx(0, abs=ELEMENTWISE)
        student = torch.zeros(1, 4, 8, requires_grad=True)
        optimizer = torch.optim.Adam([student], lr=0.1)
        for _ in range(200):
            optimizer.zero_grad()
            evaluate(loss, student, batch)[0].backward()
            optimizer.step()
        assert evaluate(loss, student, batch)[0].item() < 1e-4


def test_bad_arguments_and_batches_are_named():
    with pytest.raises(ValueError, match=r"beta=1.5 must lie in \[0, 1\]"):
        DistillationLoss(beta=1.5)
    logits, batch = one_token((0.5, 0.5), (0.75, 0.25), k=2)
    missing = {name: column for name, column in batch.items() if name != "topk_logits"}
    with pytest.raises(ValueError, match="needs the key 'topk_logits'"):
        evaluate(DistillationLoss(), logits, missing)
    with pytest.raises(ValueError, match="it has k logits for each position"):
        evaluate(DistillationLoss(), logits, {**batch, "topk_logits": torch.zeros(1, 2)})
