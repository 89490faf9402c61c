"""SmolLM2-135M-Instruct, in float32: every layout against plain transformers and TRL."""

import sys
from pathlib import Path

import field_ranks
import pytest
import real_model
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.datasets import read_pairs, read_problems
from rl_policy.data.rows import GivenRows
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

sys.path.append(str(Path(__file__).parents[3] / "packages/rl-dtensor-worker/tests"))

from rank_pool import RankPool

# float32 over 30 layers, whose sums other layouts take in another order; measured: 1e-5 to 4e-5.
LOGPROB_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5
NEW_TOKENS = 12
BETA = 0.1

QUESTIONS = [
    ("What is 2+3? Answer with the number alone.", "5"),
    ("Name the capital of France.", "The capital of France is Paris."),
    ("Write one sentence about rain.", "Rain falls from clouds and waters the fields."),
    ("Say hello in German.", "Hallo!"),
    ("What comes after Monday, Tuesday, Wednesday?", "Thursday."),
    ("Is the sea salty?", "Yes, sea water has about 35 grams of salt per litre."),
]
WRONG = ["6", "I do not know.", "Sun.", "Hola!", "Sunday.", "No."]
TP = "tensor_parallel_size"
LORA = {"enabled": True, "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
LAYOUTS = {
    "dtensor": (1, 1, {}, None),
    "dtensor-dp2": (2, 2, {}, None),
    "dtensor-tp3": (3, 1, {TP: 3}, None),
    "dtensor-packed": (1, 1, {}, 128),
    "dtensor-lora": (1, 1, {"lora": LORA}, None),
    "megatron": (1, 1, {}, None),
    "megatron-tp3": (3, 1, {"tensor_model_parallel_size": 3}, None),
}
# Of the others the same would be written.
EXPORTED = ("dtensor-tp3", "dtensor-lora", "megatron-tp3")


def conversation(question, answer):
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def problems():
    rows = [
        {"prompt": row["prompt"], "answer": row["completion"]}
        for row in (conversation(*pair) for pair in QUESTIONS)
    ]
    return read_problems(GivenRows(rows, key="rows"), key="rows")


def preference_rows():
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in (
            (conversation(question, answer), conversation(question, wrong))
            for (question, answer), wrong in zip(QUESTIONS, WRONG, strict=True)
        )
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return real_model.write(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def encoder(directory):
    return ProblemEncoder(AutoTokenizer.from_pretrained(directory))


@pytest.fixture(scope="module")
def adapters(directory, tmp_path_factory):
    """Write adapters that change the model, in peft's format."""
    torch.manual_seed(0)
    arguments = {key: value for key, value in LORA.items() if key != "enabled"}
    model = get_peft_model(load(directory), LoraConfig(**arguments))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    path = tmp_path_factory.mktemp("adapters")
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def oracles(directory, adapters, encoder):
    """Return what plain transformers give, without adapters and with them."""
    batch, prompts = encoder.answer_batch(problems()), encoder.prompt_batch(problems())
    plain = load(directory)
    found = {"": (plain_logprobs(plain, batch), plain_completions(plain, prompts))}
    adapted = PeftModel.from_pretrained(plain, adapters).eval()
    found["lora"] = plain_logprobs(adapted, batch), plain_completions(adapted, prompts)
    assert found["lora"][1] != found[""][1]
    return found


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def plain_logprobs(model, batch):
    """Return log p(token t | tokens < t), row by row without padding."""
    found = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        tokens = batch["input_ids"][row : row + 1, :length]
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        found[row, 1:length] = logprobs.gather(-1, tokens[0, 1:, None])[:, 0]
    return found


def plain_completions(model, prompts):
    found = []
    for tokens, length in zip(prompts["input_ids"], prompts["input_lengths"], strict=True):
        row = model.generate(tokens[None, :length], do_sample=False, max_new_tokens=NEW_TOKENS)
        found.append(row[0, length:].tolist())
    return found


def config_of(directory, layout, *, budget=None, adapters=None):
    backend = layout.partition("-")[0]
    _, _, section, _ = LAYOUTS[layout]
    if "lora" in section:
        section = {"lora": {**section["lora"], "adapter_path": adapters}}
    config = {
        "model_name": directory,
        "precision": "float32",
        f"{backend}_cfg": {"enabled": True, **section},
        "train_global_batch_size": 6,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 3,
        "generation": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0},
    }
    if budget:
        config["sequence_packing"] = {
            "enabled": True,
            "train_mb_tokens": budget,
            "logprob_mb_tokens": budget,
        }
    return config


def run(num_ranks, function, **arguments):
    pool = RankPool(num_ranks)
    try:
        return pool.run(function, **arguments)
    finally:
        pool.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout, directory, adapters, encoder, oracles, tmp_path):
    num_ranks, num_shares, _, budget = LAYOUTS[layout]
    batch, prompts = encoder.answer_batch(problems()), encoder.prompt_batch(problems())
    export = str(tmp_path / "export") if layout in EXPORTED else None
    results = run(
        num_ranks,
        field_ranks.score,
        config=config_of(directory, layout, budget=budget, adapters=adapters),
        batch=dict(batch),
        prompts=dict(prompts),
        num_shares=num_shares,
        budget=budget,
        export=export,
    )
    expected, completions = oracles["lora" if "lora" in layout else ""]
    assert {row for result in results for row in result.rows} == set(range(len(expected)))
    for result in results:
        found = torch.nn.functional.pad(
            result.logprobs, (0, expected.shape[1] - result.logprobs.shape[1])
        )
        torch.testing.assert_close(found, expected[result.rows], atol=LOGPROB_TOLERANCE, rtol=0)
        assert result.completions == completions
    if export is None:
        return
    # What is written is the model, with what ends and starts its completions.
    assert plain_completions(load(export), prompts) == completions
    saved, loaded = AutoTokenizer.from_pretrained(export), encoder.tokenizer
    assert saved.chat_template == loaded.chat_template
    assert saved.eos_token_id == loaded.eos_token_id


@pytest.fixture(scope="module")
def moved(directory, tmp_path_factory):
    """Write the model with noise on its last layers: the policy of preference pairs."""
    model = load(directory)
    torch.manual_seed(1)
    for layer in model.model.layers[-3:]:
        layer.mlp.down_proj.weight.data += 0.02 * torch.randn_like(layer.mlp.down_proj.weight)
    path = tmp_path_factory.mktemp("moved")
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(directory).save_pretrained(path)
    return str(path)


def trl_arguments(path, **arguments):
    return {
        "output_dir": str(path),
        "per_device_train_batch_size": len(QUESTIONS),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        **arguments,
    }


@torch.no_grad()
def first_loss(trainer):
    (inputs,) = trainer.get_train_dataloader()
    # As in its own steps: the number of tokens that the loss is a mean over.
    count = (inputs["labels"] != -100).sum() if "labels" in inputs else None
    return float(trainer.compute_loss(trainer.model.eval(), dict(inputs), num_items_in_batch=count))


def test_losses_are_those_of_trl(directory, moved, encoder, tmp_path):
    """TRL tokenizes, collates and computes by itself, from the same rows."""
    sft = SFTTrainer(
        load(moved),
        SFTConfig(**trl_arguments(tmp_path / "sft", completion_only_loss=True)),
        train_dataset=Dataset.from_list([conversation(*pair) for pair in QUESTIONS]),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )
    dpo = DPOTrainer(
        load(moved),
        load(directory),
        DPOConfig(**trl_arguments(tmp_path / "dpo", beta=BETA)),
        train_dataset=Dataset.from_list(preference_rows()),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )
    expected = [first_loss(sft), first_loss(dpo)]
    pairs = encoder.answer_batch(
        [
            row
            for pair in read_pairs(GivenRows(preference_rows(), key="rows"), key="rows")
            for row in pair.rows
        ]
    )
    pairs["reference_logprobs"] = plain_logprobs(load(directory), pairs)
    demonstrations = encoder.answer_batch(problems())
    for layout in ("dtensor", "megatron"):
        (found,) = run(
            1,
            field_ranks.losses,
            config=config_of(moved, layout),
            demonstrations=dict(demonstrations),
            pairs=dict(pairs),
            beta=BETA,
        )
        assert found == pytest.approx(expected, abs=LOSS_TOLERANCE)
    assert abs(expected[1] - 0.6931) > 1e-3  # The policy is not its reference.
