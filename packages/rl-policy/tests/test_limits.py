"""Sizes that a run has to keep are refused before it starts, by key, numbers and row."""

import json
import shutil

import pytest
import torch
from rl_policy.config import load_run_config
from rl_policy.run.inputs import prepare_inputs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

SPECIAL = ("<pad>", "<end>")
PROMPT_TOKENS = 41
PACKED, DYNAMIC = "sequence_packing", "dynamic_batching"


def byte_tokenizer(*added):
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    found.add_tokens(list(added))
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Directories of a Llama, one whose tokenizer has a token more, and a GPT-2."""
    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    llama = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **sizes
    )
    gpt2 = GPT2Config(n_positions=48, n_embd=16, n_layer=1, n_head=2, **sizes)
    for name, model, added in (
        ("llama", LlamaForCausalLM(llama), ()),
        ("added", LlamaForCausalLM(llama), ("<answer>",)),
        ("gpt2", GPT2LMHeadModel(gpt2), ()),
    ):
        model.save_pretrained(path / name)
        byte_tokenizer(*added).save_pretrained(path / name)
    return path


def prepare(recipe, path, *, row=None, model="llama", length=64, **policy):
    rows = [{"prompt": f"{n:040d}=", "answer": str(n)} for n in range(20)]
    if recipe in ("dpo", "rm"):
        rows = [{"prompt": each["prompt"], "chosen": "y", "rejected": "n"} for each in rows]
    rows[7] |= row or {}
    data = path / f"{recipe}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    own = {
        "model_name": path / model,
        "max_total_sequence_length": length,
        "train_global_batch_size": 8,
        **policy,
    }
    if recipe != "rm":
        own["generation.max_new_tokens"] = 6
    overrides = [f"policy.{key}={value}" for key, value in own.items()]
    overrides += [f"data.path={data}", "data.num_heldout=4", "cluster.bundle_ct_per_node_list=[1]"]
    return prepare_inputs(load_run_config(recipe, overrides=overrides))


def budget(kind, tokens, *, scored=64):
    settings = {"enabled": "true", "train_mb_tokens": tokens, "logprob_mb_tokens": scored}
    return {f"{kind}.{key}": value for key, value in settings.items()}


@pytest.mark.parametrize("kind", [PACKED, DYNAMIC])
@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_budget_holds_the_longest_row(names, kind, recipe):
    with pytest.raises(ValueError, match=rf"{kind}\.train_mb_tokens=63 .*_length=64 tokens"):
        prepare(recipe, names, **budget(kind, 63))
    with pytest.raises(ValueError, match=rf"{kind}\.logprob_mb_tokens=63 .*_length=64 tokens"):
        prepare(recipe, names, **budget(kind, 64, scored=63))
    prepare(recipe, names, **budget(kind, 64))


def test_a_budget_holds_the_width_that_rows_are_rounded_up_to(names):
    with pytest.raises(ValueError, match=r"train_mb_tokens=64 .* rounded up to 100"):
        prepare("sft", names, **budget(DYNAMIC, 64), **{f"{DYNAMIC}.sequence_length_round": 50})


@pytest.mark.parametrize("recipe", ["dpo", "rm"])
def test_a_budget_holds_both_rows_of_a_pair(names, recipe):
    # Prompt, one byte, end; the longest pair has three bytes more in the chosen row.
    row, width = {"chosen": "yyyy"}, PROMPT_TOKENS + 2
    packed, padded = 2 * width + 3, 2 * (width + 3)
    exact = {f"{DYNAMIC}.sequence_length_round": 1}
    for kind, size, options in ((PACKED, packed, {}), (DYNAMIC, padded, exact)):
        match = rf"{kind}\.train_mb_tokens={size - 1} .* the {size} tokens .*'0{{38}}07'"
        with pytest.raises(ValueError, match=match):
            prepare(recipe, names, row=row, **budget(kind, size - 1), **options, **head(recipe))
        prepare(recipe, names, row=row, **budget(kind, size), **options, **head(recipe))


def head(recipe):
    return {"head": "reward"} if recipe == "rm" else {}


def test_positions_that_the_model_does_not_have(names):
    with pytest.raises(ValueError, match=r"_length=64 is more than the 48 positions .*n_positions"):
        prepare("sft", names, model="gpt2")
    prepare("sft", names, model="gpt2", length=48)
    # Rotary positions have no end.
    prepare("sft", names, length=4096)


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ("grpo", {"prompt": "<answer>7="}),
        ("sft", {"answer": "<answer>"}),
        ("dpo", {"chosen": "<answer>"}),
        ("rm", {"rejected": "<answer>"}),
    ],
)
def test_tokens_that_the_model_does_not_have(names, recipe, row):
    match = r"the prompt '.*7=?' has the token '<answer>' with the id 258.* has 258 tokens"
    with pytest.raises(ValueError, match=match):
        prepare(recipe, names, model="added", row=row, **head(recipe))
    # A token that no row has is fine.
    prepare(recipe, names, model="added", **head(recipe))


def test_what_is_rewarded_follows_from_the_end_tokens_of_the_model(names, tmp_path):
    model = shutil.copytree(names / "llama", tmp_path / "model")
    other = 9
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, other]}))
    encoder = prepare("grpo", tmp_path, model="model").encoder
    pad, end, text = 0, 1, encoder.tokenizer("7")["input_ids"][0]
    completions = [[text, end], [text, other], [text, pad], [text, text]]
    generated = {
        "output_ids": torch.tensor([[text, *each] for each in completions]),
        "unpadded_sequence_lengths": torch.tensor([3, 3, 3, 3]),
        "generation_lengths": torch.tensor([2, 2, 2, 2]),
    }
    # A sampled padding token is no end of this model, and is not hidden.
    assert encoder.completion_texts(generated) == ["7", "7", "7<pad>", "77"]
    assert encoder.truncated_share(generated, max_new_tokens=2) == 0.5
