"""The policy over a backend that it has never heard of, found by its entry point."""

import os

import pytest
import ray
import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import (
    ColocatablePolicyInterface,
    GenerationInterface,
    ResidencyError,
    resolve_policy_config,
)
from rl_policy import Policy, RayVirtualCluster
from rl_policy.policy import with_absolute_paths
from rl_policy.ray.worker_group import WorkerGroupError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.timeout(180)

VOCABULARY = 16
PAD = 0
# Both sides compute the same float32 sums in another order.
TOLERANCE = {"rtol": 0, "atol": 1e-6}
NUM_RANKS = 2


@pytest.fixture(scope="module")
def stranger(stranger_path):
    import stranger_loss
    import stranger_worker

    return {"worker": stranger_worker, "loss": stranger_loss}


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


def config(**changes):
    return {
        "model_name": "a-strangers-model",
        "train_global_batch_size": 4,
        "max_total_sequence_length": 8,
        "generation": {"backend": "hf", "max_new_tokens": 2, "pad_token_id": 15},
        "timeout_s": 60,
        "stranger_cfg": {"enabled": True, "tp": 1},
        **changes,
    }


@pytest.fixture(scope="module")
def policy(cluster, tokenizer, stranger):
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
            "token_mask": valid.long(),
            "note": [f"row {row}" for row in range(len(lengths))],
        }
    )


def model():
    """Return the stranger's model, built once more in this process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))


def logprobs_by_loop(module, data):
    """Return the log-probabilities, row by row and token by token."""
    out = torch.zeros(data["input_ids"].shape)
    for row, length in enumerate(data["input_lengths"].tolist()):
        for position in range(1, length):
            token, previous = data["input_ids"][row, position], data["input_ids"][row, position - 1]
            out[row, position] = module(previous).log_softmax(-1)[token]
    return out


def train_by_loop(data, gbs):
    """Return loss and gradient norm of each step of plain SGD on the mean over all tokens."""
    module, losses, norms = model(), [], []
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for start in range(0, data.size, gbs):
        rows = data.slice(start, min(start + gbs, data.size))
        scores = logprobs_by_loop(module, rows)
        loss = -scores.sum() / rows["token_mask"][:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]))
        losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses), torch.stack(norms)


@pytest.mark.parametrize("lengths", [[6, 1, 3, 5], [2, 6, 4, 1, 3], [3]])
def test_logprobs_of_ragged_batches_come_back_in_order(policy, lengths):
    data = batch(lengths)
    expected = logprobs_by_loop(model(), data).detach()
    scores = policy.get_logprobs(data)["logprobs"]
    torch.testing.assert_close(scores, expected, **TOLERANCE)
    reference = policy.get_reference_policy_logprobs(data, micro_batch_size=1)
    torch.testing.assert_close(reference["reference_logprobs"], expected, **TOLERANCE)
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


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_steps_equal_a_plain_loop(cluster, tokenizer, stranger, tensor_parallel):
    settings = config(stranger_cfg={"enabled": True, "tp": tensor_parallel})
    policy = Policy(cluster, settings, tokenizer)
    try:
        loss_fn = stranger["loss"].MeanLogprobLoss()
        even, ragged = batch([2, 3, 4, 5, 6, 2, 3, 4]), batch([2, 3, 4, 5, 6])
        evaluated = policy.train(even, loss_fn, eval_mode=True, gbs=8)
        result = policy.train(ragged, loss_fn, mbs=3)
    finally:
        policy.shutdown()
    losses, norms = train_by_loop(ragged, gbs=4)
    torch.testing.assert_close(result["loss"], losses, **TOLERANCE)
    torch.testing.assert_close(result["grad_norm"], norms, **TOLERANCE)
    torch.testing.assert_close(evaluated["loss"], train_by_loop(even, gbs=8)[0], **TOLERANCE)
    assert evaluated["grad_norm"] is None
    # The copies of a tensor-parallel group count once.
    rows_seen = [token for rows in result["all_mb_metrics"]["rows"] for token in rows]
    assert sorted(rows_seen) == sorted(ragged["input_ids"][:, 0].tolist())
    assert set(result["all_mb_metrics"]["mbs"]) == {3}


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
    policy.save_checkpoint(tmp_path / "weights.pt")
    policy.load_checkpoint(tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="weights_path='nowhere"):
        policy.load_checkpoint("nowhere.pt")


def test_residency_is_the_documented_state_machine(policy, stranger):
    data, loss_fn = batch([3, 2]), stranger["loss"].MeanLogprobLoss()
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


def test_bad_batches_are_refused_and_the_policy_stays_usable(policy, stranger):
    loss_fn, data = stranger["loss"].MeanLogprobLoss(), batch([3, 2])
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


def test_an_exception_in_the_loss_reaches_the_caller(cluster, tokenizer, stranger):
    data = batch([3, 3, 3, 3])
    data["input_ids"][3, 0] = 14
    data["input_ids"][:3, 0] = 1
    policy = Policy(cluster, config(), tokenizer, name_prefix="doomed")
    try:
        with pytest.raises(ArithmeticError, match="a row starts with 14") as raised:
            policy.train(data, stranger["loss"].FailingLoss(14))
        assert raised.value.__notes__[0] == "raised on rank 1 of doomed during train"
        # Rank 0 waits for rank 1 in a collective, so this policy is over.
        with pytest.raises(WorkerGroupError, match="doomed has ended: a row starts with 14"):
            policy.get_logprobs(data)
    finally:
        assert policy.shutdown() is False


def test_a_policy_may_use_a_part_of_the_bundles_and_other_weights(
    cluster, tokenizer, stranger, tmp_path
):
    module = model()
    module[1].bias.data[3] += 1.0
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    policy = Policy(
        cluster,
        config(),
        tokenizer,
        workers_per_node=1,
        init_optimizer=False,
        weights_path=tmp_path / "weights.pt",
    )
    try:
        assert [info["rank"] for info in policy.get_gpu_info()] == [0]
        scores = policy.get_logprobs(batch([6, 2]))["logprobs"]
        expected = logprobs_by_loop(module, batch([6, 2])).detach()
        torch.testing.assert_close(scores, expected, **TOLERANCE)
        with pytest.raises(ValueError, match="needs an optimizer, and init_optimizer was False"):
            policy.train(batch([3]), stranger["loss"].MeanLogprobLoss())
        with pytest.raises(ValueError, match="init_optimizer was False"):
            policy.save_checkpoint("weights.pt", "optimizer.pt")
    finally:
        policy.shutdown()
    with pytest.raises(ValueError, match="workers_per_node=3 for node 0, which has 2 bundles"):
        Policy(cluster, config(), tokenizer, workers_per_node=[3])
    with pytest.raises(ValueError, match=r"workers_per_node=\[1, 1\] does not fit 1 nodes"):
        Policy(cluster, config(), tokenizer, workers_per_node=[1, 1])


def slow_to_save(cluster, tokenizer):
    section = {"enabled": True, "tp": 1, "async_checkpoint": True, "save_s": 1.0}
    return Policy(cluster, config(stranger_cfg=section), tokenizer, name_prefix="slow")


def test_a_save_in_the_background_is_waited_for(cluster, tokenizer, tmp_path):
    policy = slow_to_save(cluster, tokenizer)
    policy.save_checkpoint(tmp_path / "first.pt")
    assert not (tmp_path / "first.pt").exists()
    policy.finish_checkpoint()
    assert torch.load(tmp_path / "first.pt").keys() == model().state_dict().keys()
    policy.save_checkpoint(tmp_path / "last.pt")
    assert policy.shutdown() is True
    assert torch.load(tmp_path / "last.pt").keys() == model().state_dict().keys()


def test_a_save_in_the_background_that_failed_is_said_by_shutdown(cluster, tokenizer, tmp_path):
    policy = slow_to_save(cluster, tokenizer)
    policy.save_checkpoint(tmp_path / "missing" / "weights.pt")
    with pytest.raises(RuntimeError, match=r"missing.* does not exist"):
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
    stranger, tokenizer, without_megatron, changes, arguments, message
):
    untouched = RayVirtualCluster([NUM_RANKS], use_gpus=False)
    with pytest.raises(ValueError, match=message):
        Policy(untouched, config(**changes), tokenizer, **arguments)
    # A cluster reserves when it is first asked for its bundles, which nobody has done.
    assert untouched._placement_groups is None


def test_a_policy_that_never_started_shuts_down_in_silence(stranger, tokenizer, recwarn):
    with pytest.raises(ValueError, match="is not set"):
        Policy(RayVirtualCluster([1]), {}, tokenizer)
    assert not recwarn.list


def test_shutdown_leaves_no_process(cluster, tokenizer, stranger, wait_until_gone):
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
