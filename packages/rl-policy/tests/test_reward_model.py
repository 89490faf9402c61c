"""The recipe `rm`: a reward model from a language model, held against transformers."""

import json

import pytest
import torch
from rl_policy.config import load_run_config
from rl_policy.losses import PreferenceLoss
from rl_policy.run.directory import RunDirectory
from rl_policy.run.inputs import prepare_inputs
from rl_policy.run.metrics import read_metrics
from rl_policy.trainers import RewardTrainer
from tolerances import ELEMENTWISE, REPEATED
from transformers import AutoModelForSequenceClassification

pytestmark = [pytest.mark.needs("rl-policy[dtensor]")]

SETTINGS = {
    "rm.steps": 6,
    "rm.eval_every": 3,
    "data.num_heldout": 33,
    "data.max_number": 499,
    "policy.train_global_batch_size": 64,
    "policy.train_micro_batch_size": 16,
    "policy.optimizer.kwargs.lr": 3e-3,
    "cluster.bundle_ct_per_node_list": [1],
}


def scored(scores, mask=None, **options):
    scores = torch.tensor(scores, requires_grad=True)
    mask = torch.ones(len(scores)) if mask is None else torch.tensor(mask)
    loss, metrics = PreferenceLoss(**options)(
        scores, {"sample_mask": mask}, mask.sum(), torch.tensor(1.0)
    )
    return loss.detach(), {name: float(value) for name, value in metrics.items()}


def test_the_loss_of_the_docstring():
    # log(1 + exp(-1.5)), and 2.5 squared.
    loss, metrics = scored([2.0, 0.5])
    assert float(loss) == pytest.approx(0.2014133, rel=ELEMENTWISE)
    loss, metrics = scored([2.0, 0.5], center_coef=0.01)
    assert float(loss) == pytest.approx(0.2014133 + 0.0625, rel=ELEMENTWISE)
    assert metrics["reward_margin"] == 1.5
    assert (metrics["chosen_reward"], metrics["rejected_reward"]) == (2.0, 0.5)
    # A masked pair counts nowhere.
    masked, metrics = scored([2.0, 0.5, 9.0, -9.0], mask=[1.0, 1.0, 0.0, 0.0])
    assert float(masked) == pytest.approx(0.2014133, rel=ELEMENTWISE)
    assert metrics["pair_accuracy"] == 1.0


@pytest.mark.parametrize(
    ("scores", "mask", "message"),
    [
        ([1.0, 2.0, 3.0], None, "PreferenceLoss got 3 rows, which are no pairs"),
        ([1.0, 2.0], [1.0, 0.0], "sample_mask differs between the two rows of a pair"),
        ([[1.0, 2.0], [3.0, 4.0]], None, "needs a score for each row"),
    ],
)
def test_what_is_no_score_of_a_pair_is_refused(scores, mask, message):
    with pytest.raises(ValueError, match=message):
        scored(scores, mask)


@pytest.mark.slow
def test_a_language_model_becomes_a_reward_model_that_transformers_loads(shared_ray, tmp_path):
    trainer = RewardTrainer(config=SETTINGS, out=tmp_path / "run", progress=False)
    trainer.train()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["accuracy"] is not None] == [0, 3, 6]
    assert rows[0]["accuracy"] < rows[-1]["accuracy"]
    assert rows[-1]["loss"] < rows[1]["loss"]

    # The margin of the held-out pairs, one text at a time.
    directory = RunDirectory(tmp_path / "run")
    inputs = prepare_inputs(directory.read_config())
    model = AutoModelForSequenceClassification.from_pretrained(directory.final, dtype=torch.float32)
    assert model.config.num_labels == 1
    assert json.loads((directory.final / "config.json").read_text())["architectures"] == [
        "Qwen2ForSequenceClassification"
    ]

    def score(row):
        encoder = inputs.encoder
        tokens = [*encoder.prompt_tokens([row])[0], *encoder.answer_tokens([row])[0]]
        hidden = model.model(torch.tensor([tokens])).last_hidden_state
        return float(model.score(hidden)[0, -1, 0].detach())

    margins = [score(one) - score(two) for one, two in (p.rows for p in inputs.pairs.heldout)]
    expected = sum(margins) / len(margins)
    atol = REPEATED * max(1.0, *map(abs, margins))
    assert rows[-1]["heldout_margin"] == pytest.approx(expected, abs=atol)
    assert trainer.evaluate()["heldout_margin"] == pytest.approx(expected, abs=atol)
    with pytest.raises(ValueError, match=r"policy.generation is not set"):
        trainer.generate(["2*3="])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.head=language_model", "policy.head='language_model' gives no score of a row"),
        ("policy.train_global_batch_size=5", "policy.train_global_batch_size=5 is not even"),
        ("rm.center_coef=-1.0", "rm.center_coef=-1.0: input should be greater than or equal to 0"),
    ],
)
def test_a_wrong_key_is_named(override, message):
    with pytest.raises(ValueError, match=message):
        load_run_config("rm", overrides=[override])
