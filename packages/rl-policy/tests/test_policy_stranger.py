"""The policy over third parties' backends, found by their entry points.

`plain` is the documented example as it is installed; `stranger` is its engine behind a worker that
has only the calls that the contract requires.
"""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import ray
import torch
from patience import PATIENCE_S
from plain_backend import PairModel
from plain_loop import expected_logprobs, train_plainly
from rl_batched_data import BatchedDataDict
from rl_interfaces import (
    ColocatablePolicyInterface,
    GenerationInterface,
    ResidencyError,
    resolve_policy_config,
)
from rl_policy import Policy, RayVirtualCluster
from rl_policy.losses import NLLLoss
from rl_policy.policy import with_absolute_paths
from rl_policy.ray.failures import WorkerGroupError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tolerances import LOGPROBS, assert_all_close, assert_close, expected_of
from transformers import PreTrainedTokenizerFast

EXAMPLE = Path(__file__).parents[3] / "examples" / "plain-backend"
VOCABULARY = 16
PAD = 0
OPTIMIZER = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.0}
NUM_RANKS = 2


@pytest.fixture(scope="module")
def losses(stranger_path):
    import stranger_loss

    return stranger_loss


@pytest.fixture(scope="module")
def cluster(shared_ray, stranger_path):
    cluster = RayVirtualCluster([NUM_RANKS], use_gpus=False, max_colocated_worker_groups=3)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": PAD, **{f"w{index}": index for index in range(1, VOCABULARY)}}
    model = Tokenizer(WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="w2")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return a function that changes a config."""
    directory = tmp_path_factory.mktemp("config")
    model().save(directory / "model")

    def changed(**changes):
        return {
            "model_name": str(directory / "model"),
            "profile_dir": str(directory / "profiles"),
            "train_global_batch_size": 4,
            "train_micro_batch_size": 2,
            "max_grad_norm": 1.0,
            "max_total_sequence_length": 8,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": OPTIMIZER},
            "generation": {"backend": "hf", "max_new_tokens": 2, "pad_token_id": 15},
            "timeout_s": PATIENCE_S,
            "stranger_cfg": {"enabled": True, "tp": 1},
            **changes,
        }

    return changed


@pytest.fixture(scope="module")
def policy(cluster, config, tokenizer):
    """Two data-parallel ranks, for tests that leave the weights alone."""
    policy = Policy(cluster, config(), tokenizer)
    yield policy
    assert policy.shutdown()


def batch(lengths, width=6):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (len(lengths), width), generator=generator)
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return BatchedDataDict(
        {
            "input_ids": ids * valid,
            "input_lengths": torch.tensor(lengths),
            "sample_mask": torch.ones(len(lengths)),
            "token_mask": valid.index_fill(1, torch.tensor([0]), False).float(),
            "note": [f"row {row}" for row in range(len(lengths))],
        }
    )


def model():
    """Return the backends' initial model."""
    torch.manual_seed(0)
    return PairModel(VOCABULARY)


def train_by_loop(data, gbs):
    """Return the initial model after plain AdamW, and what `train_plainly` does of it."""
    module = model()
    adamw = partial(torch.optim.AdamW, **OPTIMIZER)
    return module, train_plainly(module, adamw, data, gbs=gbs, max_norm=1.0)


def test_the_example_passes_the_conformance_kit():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    result = subprocess.run(
        command, cwd=EXAMPLE, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.returncode == 0, result.stdout
    (counts,) = re.findall(r"TestPlainBackend: (\d+) passed, (\d+) skipped$", result.stdout, re.M)
    passed, skipped = map(int, counts)
    assert passed > 5 * skipped


def test_the_example_trains_through_the_policy(cluster, config, tokenizer, tmp_path):
    data = batch([6, 2, 4, 3, 5, 6, 2])  # two steps over two ranks, and one row too few
    settings = config(stranger_cfg={"enabled": False}, plain_cfg={"enabled": True})
    policy = Policy(cluster, settings, tokenizer)
    try:
        before = policy.get_logprobs(data)["logprobs"]
        result = policy.train(data, NLLLoss())
        policy.save_hf_checkpoint(tmp_path / "trained")
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        after = policy.get_logprobs(data)["logprobs"]
        output = policy.generate(data.slice(1, 5))
        top = policy.get_topk_logits(data, 2)["topk_logits"]
        with pytest.raises(NotImplementedError, match="'plain' does not"):
            policy.score(data)
    finally:
        assert policy.shutdown()
    _, plain = train_by_loop(data, gbs=4)
    assert_close(result["loss"], plain.losses, "loss")
    trained = PairModel.load(tmp_path / "trained")
    assert_all_close(dict(trained.named_parameters()), plain.parameters)
    assert torch.equal(reference, before)
    assert not torch.equal(after, before)
    assert torch.all(output["generation_lengths"] <= 2)
    logits = expected_of(lambda each: each(data["input_ids"]), trained, LOGPROBS)
    expected = logits.gather(logits.exact.topk(2).indices)
    for row, length in enumerate(data["input_lengths"]):
        assert_close(top[row, :length], expected[row, :length])


@pytest.mark.parametrize("lengths", [[6, 1, 3, 5], [2, 6, 4, 1, 3], [3]])
def test_logprobs_of_ragged_batches_come_back_in_order(policy, lengths):
    data = batch(lengths)
    expected = expected_logprobs(model(), data)
    scores = policy.get_logprobs(data)["logprobs"]
    assert_close(scores, expected)
    reference = policy.get_reference_policy_logprobs(data, micro_batch_size=1)
    assert_close(reference["reference_logprobs"], expected)
    scores.fill_(0)  # the caller's own memory


def test_what_the_backend_cannot_do_is_named(policy):
    data = batch([2, 3])
    with pytest.raises(NotImplementedError) as error:
        policy.get_topk_logits(data, 2)
    assert "'stranger' does not give logits" in str(error.value)
    assert "get_topk_logits of rl_interfaces.TopkLogitsWorker" in str(error.value)
    with pytest.raises(NotImplementedError, match="lacks score of"):
        policy.score(data)
    with pytest.raises(NotImplementedError, match="does not train adapters"):
        policy.save_adapters("adapters")
    for call in (
        lambda: policy.forward_backward(data, NLLLoss()),
        policy.optimizer_step,
        policy.zero_grad,
    ):
        with pytest.raises(NotImplementedError, match=r"does not train in separate calls: .*lacks"):
            call()


def test_completions_come_back_in_order_and_padded(policy):
    output = policy.generate(batch([2, 3, 1], width=3))
    # Rank 0 has two rows and adds one token to each, rank 1 has one and adds two.
    assert output["generation_lengths"].tolist() == [1, 1, 2]
    assert output["unpadded_sequence_lengths"].tolist() == [3, 4, 3]
    prompts = batch([2, 3, 1], width=3)["input_ids"].tolist()
    assert output["output_ids"].tolist() == [
        [*prompts[0][:2], prompts[0][1], 0, 15],
        [*prompts[1], prompts[1][2], 15],
        [prompts[2][0]] * 3 + [0, 0],
    ]
    assert output["logprobs"][0].tolist() == [-1, -1, -1, -1, 0]


EVEN, RAGGED = batch([2, 3, 4, 5, 6, 2, 3, 4]), batch([2, 3, 4, 5, 6])


@pytest.fixture(scope="module")
def trained(cluster, config, tokenizer, losses, tmp_path_factory):
    """Return what a policy over two copies of one data-parallel rank reports, and its save."""
    path = tmp_path_factory.mktemp("trained") / "weights"
    policy = Policy(cluster, config(stranger_cfg={"enabled": True, "tp": 2}), tokenizer)
    try:
        evaluated = policy.train(EVEN, losses.MeanLogprobLoss(), eval_mode=True, gbs=8)
        result = policy.train(RAGGED, losses.MeanLogprobLoss(), mbs=1)
        policy.save_checkpoint(path)
    finally:
        policy.shutdown()
    return evaluated, result, path


def test_training_steps_equal_a_plain_loop(trained):
    evaluated, result, _ = trained
    _, plain = train_by_loop(RAGGED, gbs=4)
    assert_close(result["loss"], plain.losses, "loss")
    assert_close(result["grad_norm"], plain.norms, "grad_norm")
    assert_close(evaluated["loss"], train_by_loop(EVEN, gbs=8)[1].losses, "loss")
    assert evaluated["grad_norm"] is None
    # The copies of a tensor-parallel group count once.
    metrics = result["all_mb_metrics"]
    assert sorted(metrics["first_tokens"]) == sorted(RAGGED["input_ids"][:, 0].tolist())
    assert metrics["num_valid_samples"] == [1] * RAGGED.size
    assert evaluated["all_mb_metrics"]["num_valid_samples"] == [2] * 4


def test_the_other_calls_reach_every_rank(policy, tmp_path):
    assert isinstance(policy, ColocatablePolicyInterface)
    assert isinstance(policy, GenerationInterface)
    infos = policy.get_gpu_info()
    assert [info["rank"] for info in infos] == [0, 1]
    assert os.getpid() not in [info["pid"] for info in infos]
    policy.start_gpu_profiling()
    policy.stop_gpu_profiling()
    policy.save_hf_checkpoint(tmp_path / "hf")
    assert (tmp_path / "hf").is_dir()
    policy.save_checkpoint(tmp_path / "weights")
    policy.load_checkpoint(tmp_path / "weights")
    with pytest.raises(ValueError, match="weights_path='nowhere"):
        policy.load_checkpoint("nowhere.pt")


def test_residency_is_the_documented_state_machine(policy, losses):
    data, loss_fn = batch([3, 2]), losses.MeanLogprobLoss()
    policy.prepare_for_lp_inference()
    with pytest.raises(ResidencyError, match="call prepare_for_training"):
        policy.train(data, loss_fn, gbs=2)
    policy.offload_before_refit()
    policy.offload_after_refit()
    with pytest.raises(ResidencyError, match=r"get_logprobs is not allowed .*'offloaded'"):
        policy.get_logprobs(data)
    assert policy.prepare_for_generation() is True
    policy.generate(data)
    assert policy.finish_generation() is True
    policy.prepare_for_training()
    policy.train(data, loss_fn, gbs=2, eval_mode=True)
    policy.finish_training()


@pytest.mark.parametrize(
    "call",
    [
        lambda policy: policy.init_collective("127.0.0.1", 1, 2),
        lambda policy: policy.prepare_refit_info(),
        lambda policy: policy.prepare_weights_for_ipc(_refit_buffer_size_gb=1),
        lambda policy: policy.get_weights_ipc_handles(["weight"]),
        lambda policy: policy.prepare_info_for_collective(),
        lambda policy: policy.broadcast_weights_for_collective(),
        lambda policy: policy.open_refit(1),
        lambda policy: policy.send_weights(1),
    ],
)
def test_a_backend_that_sends_no_weights_says_so(policy, call):
    with pytest.raises(
        NotImplementedError, match=r"'stranger' .*StrangerWorker lacks .*open_refit"
    ):
        call(policy)


def test_bad_batches_are_refused_and_the_policy_stays_usable(policy, losses):
    loss_fn, data = losses.MeanLogprobLoss(), batch([3, 2])
    del data["sample_mask"]
    with pytest.raises(ValueError, match="'sample_mask' is missing"):
        policy.train(data, loss_fn, gbs=2)
    with pytest.raises(ValueError, match="gbs=3 is not a multiple of data_parallel=2"):
        policy.train(batch([3, 2]), loss_fn, gbs=3)
    with pytest.raises(ValueError, match="over policy"):
        policy.get_logprobs(batch([3, 2], width=9))
    with pytest.raises(ValueError, match="leaves no room for a token"):
        policy.generate(batch([8, 2], width=8))
    assert policy.get_logprobs(batch([3]))["logprobs"].shape == (1, 6)


def test_an_exception_in_the_loss_reaches_the_caller(cluster, config, tokenizer, losses):
    data = batch([3, 3, 3, 3])
    data["input_ids"][3, 0] = 14
    data["input_ids"][:3, 0] = 1
    policy = Policy(cluster, config(), tokenizer, name_prefix="doomed")
    try:
        with pytest.raises(ArithmeticError, match="a row starts with 14") as raised:
            policy.train(data, losses.FailingLoss(14))
        assert raised.value.__notes__[0] == "raised on rank 1 of doomed during train"
        # Rank 0 waits for rank 1 in a collective, so this policy is over.
        with pytest.raises(WorkerGroupError, match="doomed has ended: a row starts with 14"):
            policy.get_logprobs(data)
    finally:
        assert policy.shutdown() is False


@pytest.mark.slow
def test_a_policy_may_use_a_part_of_the_bundles_and_other_weights(
    cluster, config, tokenizer, losses, trained
):
    module, plain = train_by_loop(RAGGED, gbs=4)
    policy = Policy(
        cluster,
        config(),
        tokenizer,
        workers_per_node=1,
        init_optimizer=False,
        weights_path=trained[2],
    )
    try:
        assert [info["rank"] for info in policy.get_gpu_info()] == [0]
        scores = policy.get_logprobs(batch([6, 2]))["logprobs"]
        assert_close(scores, expected_logprobs(module, batch([6, 2]), twin=plain.twin))
        with pytest.raises(ValueError, match="needs an optimizer, and init_optimizer was False"):
            policy.train(batch([3]), losses.MeanLogprobLoss())
        with pytest.raises(ValueError, match="init_optimizer was False"):
            policy.save_checkpoint("weights.pt", "optimizer.pt")
    finally:
        policy.shutdown()
    with pytest.raises(ValueError, match="workers_per_node=3 for node 0, which has 2 bundles"):
        Policy(cluster, config(train_global_batch_size=6), tokenizer, workers_per_node=[3])
    with pytest.raises(ValueError, match=r"workers_per_node=\[1, 1\] does not fit 1 nodes"):
        Policy(cluster, config(), tokenizer, workers_per_node=[1, 1])


def slow_to_save(cluster, config, tokenizer, **section):
    section |= {"enabled": True, "tp": 1, "async_checkpoint": True, "save_s": 1.0}
    return Policy(cluster, config(stranger_cfg=section), tokenizer, name_prefix="slow")


@pytest.mark.slow
def test_a_save_in_the_background_is_waited_for(cluster, config, tokenizer, tmp_path):
    policy = slow_to_save(cluster, config, tokenizer)
    policy.save_checkpoint(tmp_path / "first")
    assert not (tmp_path / "first").exists()
    policy.finish_checkpoint()
    assert (tmp_path / "first" / "note.txt").exists()
    policy.save_checkpoint(tmp_path / "last")
    assert policy.shutdown() is True
    assert (tmp_path / "last" / "note.txt").exists()


@pytest.mark.slow
def test_a_save_in_the_background_that_failed_is_said_by_shutdown(
    cluster, config, tokenizer, tmp_path
):
    policy = slow_to_save(cluster, config, tokenizer, save_fails=True)
    policy.save_checkpoint(tmp_path / "weights")
    with pytest.raises(RuntimeError, match="no space left for note"):
        policy.shutdown()
    with pytest.raises(WorkerGroupError, match="slow has ended"):
        policy.get_logprobs(batch([3]))
    assert policy.shutdown() is True


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"learning_rat": 1.0}, {}, "policy.learning_rat is not a known key, did you mean"),
        ({"stranger_cfg": {"enabled": True, "tp": 3}}, {}, "tp=3 does not divide world_size=2"),
        ({"stranger_cfg": {"enabled": False}}, {}, "no backend is enabled"),
        (
            {"stranger_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}},
            {},
            'The "megatron" backend is not installed',
        ),
        (
            {"generation": {"backend": "nowhere"}},
            {},
            "policy.generation.backend='nowhere' is not installed: there are 'hf', 'vllm'",
        ),
        ({}, {"weights_path": "nowhere.pt"}, "weights_path='nowhere.pt' does not exist"),
        (
            {},
            {"optimizer_path": os.devnull, "init_optimizer": False},
            "optimizer_path='/dev/null' contradicts init_optimizer=False",
        ),
    ],
)
def test_a_wrong_config_starts_nothing(
    config, tokenizer, stranger_path, without_megatron, changes, arguments, message
):
    untouched = RayVirtualCluster([NUM_RANKS], use_gpus=False)
    with pytest.raises(ValueError, match=message):
        Policy(untouched, config(**changes), tokenizer, **arguments)
    # A cluster reserves when it is first asked for its bundles, which nobody has done.
    assert untouched._placement_groups is None


def test_a_policy_that_never_started_shuts_down_in_silence(tokenizer, recwarn):
    with pytest.raises(ValueError, match="is not set"):
        Policy(RayVirtualCluster([1]), {}, tokenizer)
    assert not recwarn.list


@pytest.mark.slow
def test_shutdown_leaves_no_process(cluster, config, tokenizer, wait_until_gone):
    policy = Policy(cluster, config(), tokenizer)
    pids = [info["pid"] for info in policy.get_gpu_info()]
    assert policy.shutdown() is True
    wait_until_gone(pids)
    assert policy.shutdown() is True
    assert ray.is_initialized()


def test_paths_mean_the_same_in_another_directory(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    lora = {"enabled": True, "adapter_path": "adapters"}
    given = {"model_name": "model", "profile_dir": "profiles", "dtensor_cfg": {"lora": lora}}
    config = with_absolute_paths(resolve_policy_config(given))
    assert config["model_name"] == str(tmp_path / "model")
    assert config["profile_dir"] == str(tmp_path / "profiles")
    assert config["dtensor_cfg"]["lora"]["adapter_path"] == str(tmp_path / "adapters")
    assert config["dtensor_cfg"]["lora"]["enabled"] is True
    assert with_absolute_paths(config) == config


def test_a_name_on_a_hub_stays_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(resolve_policy_config({"model_name": "org/model"}))
    assert config["model_name"] == "org/model"
    assert config["dtensor_cfg"]["lora"].get("adapter_path") is None
