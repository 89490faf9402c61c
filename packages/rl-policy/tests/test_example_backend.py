"""The example of a stranger's backend: it proves itself, and trains through the policy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain_backend import PairModel
from rl_batched_data import BatchedDataDict
from rl_policy import Policy, RayVirtualCluster
from rl_policy.losses import NLLLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

EXAMPLE = Path(__file__).parents[3] / "examples" / "plain-backend"
VOCABULARY = 16
OPTIMIZER = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.0}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # float32 sums in another order, over two ranks

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    PairModel(VOCABULARY).save(path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": 0, **{f"w{index}": index for index in range(1, VOCABULARY)}}
    backend = Tokenizer(WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="w1")


@pytest.fixture(scope="module")
def policy(shared_ray, model, tokenizer):
    cluster = RayVirtualCluster([2], use_gpus=False)
    config = {
        "model_name": model,
        "train_global_batch_size": 4,
        "train_micro_batch_size": 1,
        "max_grad_norm": 1.0,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": OPTIMIZER},
        "generation": {"max_new_tokens": 3},
        "plain_cfg": {"enabled": True},
    }
    policy = Policy(cluster, config, tokenizer)
    yield policy
    assert policy.shutdown()
    cluster.shutdown()


def batch():
    """Return 7 rows of unlike lengths: two steps over two ranks, and one row too few."""
    lengths = torch.tensor([6, 2, 4, 3, 5, 6, 2])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (7, 6), generator=generator)
    inside = torch.arange(6) < lengths[:, None]
    targets = inside.clone()
    targets[:, 0] = False
    return BatchedDataDict(
        input_ids=ids * inside,
        input_lengths=lengths,
        token_mask=targets.float(),
        sample_mask=torch.ones(7),
    )


def train_by_loop(module, data):
    """Return the loss of each step of plain AdamW."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), **OPTIMIZER), []
    for start in (0, 4):
        ids, mask = (data[key][start : start + 4] for key in ("input_ids", "token_mask"))
        scores = module(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(scores * mask[:, 1:]).sum() / mask[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_it_passes_the_conformance_kit():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    result = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout
    (counts,) = re.findall(r"TestPlainBackend: (\d+) passed, (\d+) skipped$", result.stdout, re.M)
    passed, skipped = map(int, counts)
    assert passed > 5 * skipped


def test_it_trains_through_the_policy(policy, model, tmp_path):
    module, data = PairModel.load(model), batch()
    before = policy.get_logprobs(data)["logprobs"]
    losses = train_by_loop(module, data)
    torch.testing.assert_close(policy.train(data, NLLLoss())["loss"], losses, **TOLERANCE)
    policy.save_hf_checkpoint(tmp_path / "trained")
    trained = PairModel.load(tmp_path / "trained")
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter, module.state_dict()[name], **TOLERANCE)
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert torch.equal(reference, before)
    assert not torch.equal(policy.get_logprobs(data)["logprobs"], before)
    output = policy.generate(data)
    assert torch.all(output["generation_lengths"] <= 3)
    top = policy.get_topk_logits(data, 2)["topk_logits"]
    expected = trained(data["input_ids"]).topk(2).values
    for row, length in enumerate(data["input_lengths"]):
        torch.testing.assert_close(top[row, :length], expected[row, :length], **TOLERANCE)
    with pytest.raises(NotImplementedError, match="'plain' does not"):
        policy.score(data)
