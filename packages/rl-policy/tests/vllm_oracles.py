"""A small model, prompts for it, what plain transformers says of a sample, and whole refits."""

import pytest
import torch
from rl_batched_data import BatchedDataDict
from rl_refit import RefitError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tolerances import ENGINE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TOLERANCE = ENGINE
MAX_MODEL_LEN = 48
TEXTS = ["the first prompt", "ab", "a third, which is longer", "x", "one more"]


def ascii_tokenizer():
    """Return a tokenizer with a token per printable ASCII character, so that all text is clean."""
    characters = ["Ġ", *(chr(code) for code in range(33, 127))]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<end>", *characters])}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )


def sizes_for(tokenizer):
    """Return the sizes and tokens of a tiny model's config."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        # Large, so that the distribution is far from uniform.
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def endless_tokenizer():
    """Return the tokenizer without an end, so that rows end at their length alone."""
    tokenizer = ascii_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def long_llama(tokenizer, *, seed=0):
    """Return a Llama for rows of up to 1,024 tokens."""
    torch.manual_seed(seed)
    sizes = sizes_for(tokenizer) | {
        "max_position_embeddings": 1024,
        "eos_token_id": None,
        # Rows are long, and float32 is off in proportion to the logits.
        "initializer_range": 0.15,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes)).float().eval()


def save_llama(path, tokenizer, seed=0):
    """Write a Llama with random weights and its tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes_for(tokenizer))
    LlamaForCausalLM(config).float().save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_experts(path, tokenizer):
    """Write a Qwen3 mixture of experts with random weights and its tokenizer."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **sizes_for(tokenizer),
        # Not a multiple of 32, to which the kernel of the CPU pads it.
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(path)
    tokenizer.save_pretrained(path)


def generation_config(model_path, **vllm_cfg):
    """Return a `GenerationConfig` of a small engine on the CPU."""
    return {
        "backend": "vllm",
        "model_name": str(model_path),
        "max_new_tokens": 8,
        "temperature": 0.7,
        "vllm_cfg": {
            "precision": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 16 << 20,
            "enforce_eager": True,
        }
        | vllm_cfg,
    }


def prompts_of(tokenizer, texts, **keys):
    rows = [tokenizer.encode(text) for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    input_ids = torch.full((len(rows), int(lengths.max())), tokenizer.pad_token_id)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row)
    return BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, **keys})


def expected_logprobs(model, output, *, temperature=1.0, truncate=lambda logits: logits):
    """Return the log-probability of every token behind the prompt, by plain transformers."""
    expected = torch.zeros_like(output["logprobs"])
    lengths, generated = output["unpadded_sequence_lengths"], output["generation_lengths"]
    for row, ids in enumerate(output["output_ids"]):
        end, count = int(lengths[row]), int(generated[row])
        with torch.no_grad():
            logits = model(ids[None, :end]).logits[0].float() / temperature
        logprobs = truncate(logits).log_softmax(-1)[:-1].gather(-1, ids[1:end, None])[:, 0]
        expected[row, end - count : end] = logprobs[end - count - 1 :]
    return expected


def keep_nucleus(logits, *, top_k, top_p):
    """Return `logits` without all but the top k, and then without all but the nucleus."""
    out = torch.full_like(logits, float("-inf"))
    for position, row in enumerate(logits):
        best = row.argsort(descending=True)[:top_k]
        probabilities = row[best].double().softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        kept = best[before < top_p]
        out[position, kept] = row[kept]
    return out


def completion_of(output, row):
    end, count = output["unpadded_sequence_lengths"][row], output["generation_lengths"][row]
    return output["output_ids"][row, end - count : end].tolist()


def completions_of(output):
    return [completion_of(output, row) for row in range(len(output["output_ids"]))]


def greedy_completion(model, prompt, *, num_tokens, stops):
    """Return the most likely continuation, by plain transformers, a full forward per token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def refit(engines, sender, version, **options):
    """Send a version of the weights to its end; return the receivers' reports.

    Args:
        options: Of `begin_update`.
    """
    engines.begin_update(version, **options)
    call = engines.update(version)
    sender.send(version)
    reports = engines.wait_for_update(call)
    engines.commit_update(version)
    sender.commit(version)
    return reports


def fail_to_refit(engines, sender, version, *, told):
    """Hold that a refit fails on both sides, with the same words."""
    engines.begin_update(version)
    call = engines.update(version)
    with pytest.raises(RefitError, match=told):
        sender.send(version)
    with pytest.raises(RefitError, match=told):
        engines.wait_for_update(call)
