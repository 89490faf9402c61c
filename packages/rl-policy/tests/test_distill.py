"""The recipe `distill`: a real teacher beside a real policy, held against transformers."""

from functools import partial

import pytest
import torch
from backend_runs import ADAMW, batch, config, make_tokenizer, save_model
from kept_clusters import kept_cluster
from rl_policy import Policy
from rl_policy.cli import build_app
from rl_policy.config import load_run_config
from rl_policy.config.sections import TinyModelSection
from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config
from rl_policy.losses import DistillationLoss
from rl_policy.recipes.distill import teacher_policy
from rl_policy.run.inputs import prepare_inputs
from rl_policy.run.metrics import read_metrics
from tolerances import assert_close, in_float64, measured_training
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from typer.testing import CliRunner

pytestmark = [pytest.mark.needs("rl-policy[dtensor]")]

SETTINGS = [
    "distill.eval_every=4",
    "distill.top_k=16",
    "data.num_heldout=16",
    "data.max_number=99",
    "policy.train_global_batch_size=32",
    "policy.train_micro_batch_size=16",
    "policy.logprob_batch_size=16",
    "policy.optimizer.kwargs.lr=3e-3",
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return the directory of a model with the built-in vocabulary, as wide as the built-in one."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    shape = tiny_model_config(TinyModelSection(num_layers=1), max_sequence_length=32)
    build_tiny_model(path, config=shape, seed=5)
    return path


def run(out, *settings):
    arguments = ["distill", "--out", str(out), *SETTINGS, *settings]
    result = CliRunner().invoke(build_app(), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return read_metrics(out / "metrics.jsonl")


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_on_two_ranks_and_resumes(shared_ray, teacher, tmp_path):
    names = [f"distill.teacher={teacher}", "checkpoint.every=6"]
    rows = run(tmp_path / "whole", *names, "distill.steps=12")
    assert [row["step"] for row in rows if row["accuracy"] is not None] == [0, 4, 6, 8, 12]
    assert rows[-1]["loss"] < 0.9 * rows[1]["loss"]
    assert rows[-1]["teacher_agreement"] > rows[1]["teacher_agreement"]
    assert 0 < rows[1]["teacher_coverage"] < 1

    run(tmp_path / "parted", *names, "distill.steps=6")
    resumed = CliRunner().invoke(
        build_app(), ["distill", "--resume", str(tmp_path / "parted"), "distill.steps=12"]
    )
    assert resumed.exit_code == 0, resumed.output
    again = read_metrics(tmp_path / "parted" / "metrics.jsonl")
    for name in ("loss", "grad_norm", "teacher_agreement", "completion_length_mean"):
        assert [row[name] for row in again] == [row[name] for row in rows], name
    # The teacher is what it was, and is not among the files of the run.
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "final").state_dict()
        for name in ("whole", "parted")
    ]
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert len(models[0]) != len(AutoModelForCausalLM.from_pretrained(teacher).state_dict())


@pytest.mark.slow
def test_without_a_teacher_one_is_fine_tuned_first(shared_ray, tmp_path):
    settings = ["sft.steps=3", "sft.eval_every=3", "distill.steps=2", "data.num_validation=16"]
    rows = run(tmp_path / "out", *settings)
    assert len(rows) == 3
    fine_tuned = read_metrics(tmp_path / "out" / "teacher" / "metrics.jsonl")
    assert [row["step"] for row in fine_tuned] == [0, 1, 2, 3]
    assert (tmp_path / "out" / "teacher" / "final").is_dir()
    # It is not what the student starts from.
    assert not (tmp_path / "out" / "warm_up").exists()


def row_loss(logits, teacher_logits, mask, *, beta, k):
    """Return the sum over a row's targets, from whole logits `[seq, vocab]` in float64."""
    known = torch.zeros_like(teacher_logits, dtype=torch.bool)
    known.scatter_(-1, teacher_logits.topk(k, dim=-1).indices, value=True)
    t = teacher_logits.double().where(known, -torch.inf).softmax(-1)
    s = logits.double().softmax(-1)
    m = beta * t + (1 - beta) * s
    kl = [
        # 0 log 0 is 0, and so is its gradient.
        (p * (torch.where(p > 0, p, 1.0) / m).log()).sum(-1) * weight
        for p, weight in ((t, beta), (s, 1 - beta))
    ]
    return ((kl[0] + kl[1])[:-1] * mask[1:]).sum()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return the directories of a student and of a teacher with other weights."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = make_tokenizer()
    student = save_model(folder / "student", tokenizer)
    model = Qwen3ForCausalLM.from_pretrained(student)
    torch.manual_seed(9)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    return student, str(folder / "teacher")


def packed(tokens):
    return {
        "enabled": True,
        "train_mb_tokens": tokens,
        "logprob_mb_tokens": tokens,
        "algorithm": "modified_first_fit_decreasing",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_packing": packed(20)},
        {"dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2}},
        {"dtensor_cfg": {"enabled": True, "context_parallel_size": 2}},
    ],
    ids=["packed", "tp2", "cp2"],
)
def test_loss_and_gradient_equal_those_of_transformers(shared_ray, pair, settings):
    beta, k, data = 0.3, 5, batch().slice(0, 4)
    sections = {**config(pair[0], "dtensor", {}), **settings}
    cluster = kept_cluster([2], use_gpus=False, max_colocated_worker_groups=2)
    try:
        tokenizer = make_tokenizer()
        teacher = Policy(
            cluster,
            {**sections, "model_name": pair[1]},
            tokenizer,
            init_optimizer=False,
            init_reference_model=False,
        )
        policy = Policy(cluster, sections, tokenizer, init_reference_model=False)
        teacher.prepare_for_lp_inference()
        scored = data.copy()
        scored.update(teacher.get_topk_logits(data, k))
        teacher.shutdown()
        policy.prepare_for_training()
        found = policy.train(scored, DistillationLoss(beta=beta))
        policy.shutdown()
    finally:
        cluster.shutdown()

    models = [Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32) for path in pair]
    teachers = {torch.float32: models[1], torch.float64: in_float64(models[1])}

    def plain_loss(model, data):
        terms = []
        for row, length in enumerate(data["input_lengths"].tolist()):
            tokens = data["input_ids"][row : row + 1, :length]
            with torch.no_grad():
                target = teachers[model.dtype](tokens).logits[0]
            mask = data["token_mask"][row, :length]
            terms.append(row_loss(model(tokens).logits[0], target, mask, beta=beta, k=k))
        terms = torch.stack(terms)
        return terms.sum() / data["token_mask"].sum(), terms

    adamw = partial(torch.optim.AdamW, **ADAMW)
    plain = measured_training(models[0], adamw, plain_loss, [data])
    assert_close(found["loss"], plain.losses, "loss")
    assert_close(found["grad_norm"].reshape(1), plain.norms, "grad_norm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["policy.model_name=./model"], "distill.teacher is not set"),
        (["distill.beta=2"], "distill.beta=2"),
        (["distill.teacher=./nowhere"], "distill.teacher='./nowhere' is no directory"),
        (["distill.teacher_policy.precision=float7"], "distill.teacher_policy.precision"),
        (["distill.teacher_policy.head=reward"], "distill.teacher_policy.head='reward'"),
        (
            [
                "policy.generation.backend=vllm",
                "refit.verify=logprobs",
                "refit.max_mismatch=0.1",
            ],
            "refit.verify='logprobs' compares",
        ),
        (
            ["policy.generation.backend=vllm", "refit.delta=true"],
            r"refit\.delta=True contradicts policy\.generation\.colocated",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load_run_config("distill", overrides=settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["distill.top_k=300"], "distill.top_k=300 is more than the 258 tokens"),
        (["distill.beta=1"], "distill.beta=1 is infinite with distill.top_k=8 of 258 tokens"),
    ],
)
def test_what_the_teacher_cannot_give_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        prepare_inputs(load_run_config("distill", overrides=settings))


def test_what_the_backend_refuses_of_the_teacher_is_named_as_the_user_has_written_it():
    given = ["distill.teacher_policy.dtensor_cfg.tensor_parallel_size=3"]
    parallel = r"^distill\.teacher_policy\.dtensor_cfg\.tensor_parallel_size=3 "
    with pytest.raises(ValueError, match=parallel) as raised:
        prepare_inputs(load_run_config("distill", overrides=given))
    assert " policy." not in str(raised.value)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    other = save_model(tmp_path / "other", make_tokenizer())
    config = load_run_config("distill", overrides=[f"distill.teacher={other}"])
    with pytest.raises(ValueError, match="another vocabulary than the model: 64 tokens and 258"):
        prepare_inputs(config)


def test_adapters_are_the_students():
    lora = "policy.dtensor_cfg.lora.enabled=true"
    resolved = load_run_config("distill", overrides=[lora])
    assert resolved.policy["dtensor_cfg"]["lora"]["enabled"]
    assert not teacher_policy(resolved)["dtensor_cfg"]["lora"]["enabled"]
