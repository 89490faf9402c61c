"""What a policy on one of the training backends gives, of a model that either can load."""

from functools import partial

import torch
from kept_clusters import kept_cluster
from plain_loop import expected_logprobs, train_plainly
from rl_batched_data import BatchedDataDict
from rl_policy import Policy
from rl_policy.losses import NLLLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, PAD, EOS = 64, 0, 1
NUM_CALLS = 3
ADAMW = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0}


def make_tokenizer():
    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


def save_model(path, tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def config(model_path, backend, sizes):
    return {
        "model_name": model_path,
        "precision": "float32",
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_grad_norm": 1.0,
        "max_total_sequence_length": 16,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": ADAMW},
        "generation": {"backend": "hf", "max_new_tokens": 5, "temperature": 1.0},
        f"{backend}_cfg": {"enabled": True, **sizes},
    }


def batch():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 4, 7, 10, 3, 8])
    width = int(lengths.max())
    input_ids = torch.randint(2, VOCABULARY, (len(lengths), width), generator=generator)
    is_token = torch.arange(width) < lengths[:, None]
    token_mask = is_token.float()
    token_mask[:, 0] = 0
    return BatchedDataDict(
        {
            "input_ids": torch.where(is_token, input_ids, PAD),
            "input_lengths": lengths,
            "token_mask": token_mask,
            "sample_mask": torch.ones(len(lengths)),
        }
    )


def plain_results(model_path):
    """Return what plain transformers and a plain loop give of the same numbers, by name."""
    model, data = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32), batch()
    before = expected_logprobs(model, data)
    adamw = partial(torch.optim.AdamW, **ADAMW)
    trained = train_plainly(model, adamw, data, num_calls=NUM_CALLS, max_norm=1.0)
    after = expected_logprobs(model, data, twin=trained.twin)
    assert (after.exact - before.exact).abs().max() > 1e-3
    return {
        "before": before,
        "reference": before,
        "after": after,
        "losses": trained.losses,
        "grad_norms": trained.norms,
    }


def run(model_path, tokenizer, backend, sizes, directory, *, use_gpus=False):
    """Return what the calls of a policy on `backend` give."""
    cluster = kept_cluster([2], use_gpus=use_gpus)
    policy = Policy(cluster, config(model_path, backend, sizes), tokenizer)
    try:
        before = policy.get_logprobs(batch())["logprobs"]
        policy.prepare_for_training()
        results = [policy.train(batch(), NLLLoss()) for _ in range(NUM_CALLS)]
        policy.save_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
        policy.prepare_for_lp_inference()
        after = policy.get_logprobs(batch())["logprobs"]
        reference = policy.get_reference_policy_logprobs(batch())["reference_logprobs"]
        prompts = BatchedDataDict({key: batch()[key] for key in ("input_ids", "input_lengths")})
        completions = policy.generate(prompts, greedy=True)
        return {
            "before": before,
            "reference": reference,
            "after": after,
            "losses": torch.cat([result["loss"] for result in results]),
            "grad_norms": torch.cat([result["grad_norm"] for result in results]),
            "names": policy.prepare_refit_info(),
            "infos": policy.get_gpu_info(),
            "output_ids": completions["output_ids"],
        }
    finally:
        policy.shutdown()
        cluster.shutdown()
