"""The policy over the DTensor worker, against plain transformers."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import ray
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from plain_loop import expected_logprobs, plain_logprobs, train_plainly
from rl_batched_data import BatchedDataDict
from rl_interfaces import LossInput, LossType, ResidencyError
from rl_interfaces.backend.runtime import ReservedPort
from rl_policy import Policy, RayVirtualCluster
from rl_policy.losses import ClippedPGLoss, NLLLoss
from rl_refit import PoisonedError, RefitError, RefitInProgress, RefitReceiver
from rl_refit.compat.broadcast import BroadcastGroup
from rl_refit.compat.handles import rebuild
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tolerances import LOGPROBS, SUMS, assert_close, expected_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

pytestmark = [pytest.mark.needs("rl-policy[dtensor]")]

VOCABULARY, PAD, EOS = 64, 0, 1
MAX_NEW_TOKENS = 5
SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def plain_model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cluster(shared_ray):
    cluster = kept_cluster([2], use_gpus=False, max_colocated_worker_groups=2)
    yield cluster
    cluster.shutdown()


def config(model_path, **changes):
    return {
        "model_name": model_path,
        "precision": "float32",
        "dtensor_cfg": {"enabled": True},
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_total_sequence_length": 32,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}},
        "generation": {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.0},
        "timeout_s": PATIENCE_S,
        **changes,
    }


LAYOUTS = [
    # Of one rank there is `test_training_equals_a_plain_loop`, and most runs of `recipe_runs` are.
    pytest.param((2, {}), id="two ranks"),
    pytest.param(
        (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
        id="two ranks share layers",
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def policy(request, cluster, model_path, tokenizer):
    num_ranks, sizes = request.param
    section = {"enabled": True, **sizes}
    policy = Policy(
        cluster,
        config(model_path, dtensor_cfg=section),
        tokenizer,
        workers_per_node=num_ranks,
    )
    yield policy
    assert policy.shutdown() is True


def batch(lengths, width=9):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (len(lengths), width), generator=generator)
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    token_mask = valid.float()
    token_mask[:, 0] = 0
    return BatchedDataDict(
        {
            "input_ids": torch.where(valid, ids, PAD),
            "input_lengths": torch.tensor(lengths),
            "token_mask": token_mask,
            "sample_mask": torch.ones(len(lengths)),
        }
    )


@pytest.mark.promise
def test_logprobs_equal_plain_transformers(policy, plain_model):
    data = batch([9, 2, 5, 7, 1])
    expected = expected_logprobs(plain_model, data)
    scores = policy.get_logprobs(data)["logprobs"]
    assert_close(scores, expected)
    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert_close(reference, expected)


def test_a_step_puts_each_column_into_the_object_store_once(policy, monkeypatch):
    data, puts = batch([9, 2, 5, 7]), []
    put = ray.put

    def counted(value):
        if isinstance(value, BatchedDataDict):
            puts.append(set(value))
        return put(value)

    monkeypatch.setattr(ray, "put", counted)
    alone = policy.get_logprobs(data)["logprobs"]
    assert puts == [set(data)]
    puts.clear()
    with policy.keeping_batches():
        data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
        policy.get_reference_policy_logprobs(data)
        loss = policy.train(data, NLLLoss(), eval_mode=True)["loss"]
    assert puts == [{*data} - {"prev_logprobs"}, {"prev_logprobs"}]
    assert torch.equal(data["prev_logprobs"], alone)
    assert torch.equal(loss, policy.train(data, NLLLoss(), eval_mode=True)["loss"])


@pytest.mark.parametrize("micro_batch_size", [1, 2, None])
def test_topk_logits_equal_plain_transformers(policy, plain_model, micro_batch_size):
    data = batch([9, 2, 5, 7, 1])
    top = policy.get_topk_logits(data, 3, micro_batch_size=micro_batch_size)
    assert top["topk_logits"].shape == top["topk_indices"].shape == (5, 9, 3)
    for row, length in enumerate(data["input_lengths"].tolist()):
        tokens = data["input_ids"][row : row + 1, :length]
        logits = expected_of(
            lambda each, tokens=tokens: each(tokens).logits[0], plain_model, LOGPROBS
        )
        indices = logits.exact.topk(3).indices
        assert_close(top["topk_logits"][row, :length], logits.gather(indices))
        assert torch.equal(top["topk_indices"][row, :length], indices)
        assert not top["topk_logits"][row, length:].any()


@pytest.mark.slow
def test_a_reward_model_scores_rows_in_order(cluster, model_path, tokenizer, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(
        model_path, num_labels=1, dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    packing = {"enabled": True, "train_mb_tokens": 16, "logprob_mb_tokens": 16}
    judge = Policy(
        cluster,
        config(str(tmp_path), head="reward", sequence_packing=packing),
        tokenizer,
        init_optimizer=False,
        init_reference_model=False,
    )
    data = batch([9, 2, 5, 7, 1])
    try:
        scores = judge.score(data)["scores"]
    finally:
        judge.shutdown()
    rows = list(zip(data["input_ids"], data["input_lengths"].tolist(), strict=True))

    def scores_of(model):
        return torch.cat([model(ids[None, :length]).logits[0] for ids, length in rows])

    expected = expected_of(scores_of, model, LOGPROBS)
    assert_close(scores, expected)


@pytest.mark.slow
@pytest.mark.needs("rl-policy[lora]")
def test_adapters_are_saved_as_peft_reads_them(
    cluster, model_path, tokenizer, plain_model, tmp_path
):
    peft = pytest.importorskip("peft", reason="comes with the extra lora")
    lora = {"enabled": True, "r": 2, "lora_alpha": 4}
    section = {"enabled": True, "tensor_parallel_size": 2, "lora": lora}
    policy = Policy(cluster, config(model_path, dtensor_cfg=section), tokenizer)
    data = batch([9, 2, 5, 7])
    try:
        policy.train(data, NLLLoss())
        trained = policy.get_logprobs(data)["logprobs"]
        policy.save_adapters(tmp_path / "adapters")
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    finally:
        policy.shutdown()
    assert_close(reference, expected_logprobs(plain_model, data))
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    assert_close(trained, expected_logprobs(adapted, data))
    assert (trained - reference).abs().max() > 1e-3


def test_a_policy_without_adapters_has_none_to_save(policy, tmp_path):
    with pytest.raises(ValueError, match=r"needs policy.dtensor_cfg.lora.enabled=True"):
        policy.save_adapters(tmp_path / "adapters")
    assert policy.get_gpu_info()


def test_a_single_row_leaves_a_rank_without_work(policy, plain_model):
    data = batch([4])
    scores = policy.get_logprobs(data)["logprobs"]
    assert_close(scores, expected_logprobs(plain_model, data))
    assert policy.generate(data, greedy=True)["output_ids"].shape[0] == 1


@pytest.mark.promise
def test_greedy_completions_equal_plain_transformers(policy, plain_model):
    prompts = batch([3, 7, 1, 5, 9])
    output = policy.generate(prompts, greedy=True)
    for row, length in enumerate(prompts["input_lengths"].tolist()):
        prompt = prompts["input_ids"][row : row + 1, :length]
        expected = plain_model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )[0].tolist()
        assert output["unpadded_sequence_lengths"][row] == len(expected)
        assert output["generation_lengths"][row] == len(expected) - length
        assert output["output_ids"][row, : len(expected)].tolist() == expected
        assert (output["output_ids"][row, len(expected) :] == PAD).all()


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.promise
def test_training_equals_a_plain_loop(
    cluster, model_path, tokenizer, plain_model, tmp_path, num_ranks
):
    data = batch([9, 2, 5, 7, 3, 8])  # a whole global batch, and half of one
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    plain = train_plainly(model, SGD, data)

    policy = Policy(cluster, config(model_path), tokenizer, workers_per_node=num_ranks)
    try:
        evaluated = policy.train(data, NLLLoss(), eval_mode=True)
        result = policy.train(data, NLLLoss())
        trained = policy.get_logprobs(data)["logprobs"]
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        policy.save_hf_checkpoint(tmp_path / "final")
    finally:
        policy.shutdown()

    assert set(result) == {"loss", "grad_norm", "all_mb_metrics"}
    assert_close(result["loss"], plain.losses, "loss")
    assert_close(result["grad_norm"], plain.norms, "grad_norm")
    assert_close(evaluated["loss"][0], plain.losses[0], "loss")
    assert evaluated["grad_norm"] is None
    assert sum(result["all_mb_metrics"]["num_valid_samples"]) == data.size
    after = expected_logprobs(model, data, twin=plain.twin)
    assert_close(trained, after)
    assert_close(reference, expected_logprobs(plain_model, data))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    assert_close(plain_logprobs(reloaded, data), after)


def pair_loss():
    """Return a loss over adjacent rows, of a class that Ray pickles by value."""

    class PairLoss:
        """Minus the log-sigmoid of how much likelier a pair's first row is than its second."""

        loss_type = LossType.SEQUENCE_LEVEL
        input_type = LossInput.LOGPROBS
        rows_per_group = 2

        def __call__(self, logprobs, data, global_valid_seqs, global_valid_toks):
            assert torch.equal(data["pair"][::2], data["pair"][1::2])
            scores = (logprobs * data["token_mask"]).sum(-1)
            margins = scores[::2] - scores[1::2]
            mask = data["sample_mask"]
            loss = -(torch.nn.functional.logsigmoid(margins) * mask[::2]).sum()
            return loss / (global_valid_seqs / 2), {"num_valid_samples": mask.sum().item()}

    return PairLoss()


@pytest.mark.slow
@pytest.mark.parametrize("section", [None, "sequence_packing", "dynamic_batching"])
def test_pairs_of_rows_train_as_on_one_rank(cluster, model_path, tokenizer, plain_model, section):
    # Pairs of unlike lengths, which planners would part; the last step leaves a rank without any.
    data = batch([9, 2, 5, 7, 3, 8, 2, 2, 9, 4])
    data["pair"] = torch.arange(data.size) // 2
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def loss(logprobs, rows):
        return pair_loss()(logprobs, rows, torch.tensor(float(rows.size)), None)[0]

    plain = train_plainly(model, SGD, data, loss=loss)
    budgets = {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 20}
    changes = {} if section is None else {section: budgets}
    if section == "dynamic_batching":
        budgets["sequence_length_round"] = 1
    policy = Policy(cluster, config(model_path, **changes), tokenizer)
    try:
        result = policy.train(data, pair_loss())
        trained = policy.get_logprobs(data)["logprobs"]
        with pytest.raises(ValueError, match="gbs=6 is not a multiple of data_parallel=2 x rows"):
            policy.train(data, pair_loss(), gbs=6)
    finally:
        policy.shutdown()
    assert_close(result["loss"], plain.losses, "loss")
    assert_close(result["grad_norm"], plain.norms, "grad_norm")
    after = expected_logprobs(model, data, twin=plain.twin)
    assert_close(trained, after)
    assert sum(result["all_mb_metrics"]["num_valid_samples"]) == data.size


def row_loss():
    """Return a loss whose ratio and mask are of a sequence, so that it needs full rows."""
    return ClippedPGLoss(
        loss_type=LossType.SEQUENCE_LEVEL,
        ratio_level="sequence",
        importance_mode="sequence_mask",
        importance_cap=1.25,
        importance_floor=0.8,
    )


@pytest.mark.parametrize(
    ("sizes", "section"),
    [
        ({"context_parallel_size": 2}, "sequence_packing"),
        pytest.param({}, "sequence_packing", marks=pytest.mark.slow),
        pytest.param({}, "dynamic_batching", marks=pytest.mark.slow),
        pytest.param({"context_parallel_size": 2}, None, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, "dynamic_batching", marks=pytest.mark.slow),
    ],
)
def test_a_ratio_of_sequences_sees_full_rows_in_every_layout(
    cluster, model_path, tokenizer, plain_model, sizes, section
):
    data = batch([9, 2, 5, 7, 3, 8, 2, 4])
    noise = [torch.randn(8, 9, generator=torch.manual_seed(seed)) for seed in (1, 2, 3)]
    data["prev_logprobs"] = plain_logprobs(plain_model, data).detach() + 0.1 * noise[0]
    data["generation_logprobs"] = data["prev_logprobs"] + 0.1 * noise[1]
    data["advantages"] = noise[2]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    outside = []

    def loss(logprobs, rows):
        counts = torch.tensor(float(rows.size)), rows["token_mask"].sum()
        value, metrics = row_loss()(logprobs, rows, *counts)
        outside.append(float(metrics["importance_outside"]))
        return value

    plain = train_plainly(model, SGD, data, loss=loss)
    assert 0 < sum(outside) < len(outside), "a mask of all or of none would show nothing here"
    budgets = {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 20}
    changes = {} if section is None else {section: budgets}
    if section == "dynamic_batching":
        budgets["sequence_length_round"] = 1
    changes["dtensor_cfg"] = {"enabled": True, **sizes}
    policy = Policy(cluster, config(model_path, **changes), tokenizer)
    try:
        result = policy.train(data, row_loss())
    finally:
        policy.shutdown()
    assert_close(result["loss"], plain.losses, "loss")
    assert_close(result["grad_norm"], plain.norms, "grad_norm")


# Calls of 1, 4 and 2 rows: on two ranks, one of them has none in the first.
SPLIT_LENGTHS, SPLIT_EDGES = [9, 2, 5, 7, 3, 8, 4], (0, 1, 5, 7)


def in_calls(policy, data, loss_fn, edges=SPLIT_EDGES):
    """Return the losses of a call per chunk of rows, and the step."""
    chunks = [data.slice(start, end) for start, end in pairwise(edges)]
    losses = [float(policy.forward_backward(chunk, loss_fn)["loss"]) for chunk in chunks]
    return losses, policy.optimizer_step()


def sequence_loss():
    return ClippedPGLoss(loss_type=LossType.SEQUENCE_LEVEL, kl_coef=0.1)


@pytest.mark.parametrize("make_loss", [NLLLoss, sequence_loss])
def test_calls_and_a_step_equal_one_call_of_train(policy, tmp_path, make_loss):
    data = batch(SPLIT_LENGTHS)
    data["sample_mask"][2] = 0
    data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"] - 0.1
    data["reference_logprobs"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    data["advantages"] = torch.randn(data["input_ids"].shape, generator=torch.manual_seed(1))
    policy.save_checkpoint(tmp_path / "weights")
    at_once = policy.train(data, make_loss(), gbs=8)
    expected = parameters(policy)
    policy.load_checkpoint(tmp_path / "weights")
    losses, step = in_calls(policy, data, make_loss())
    assert step["grad_norm"] == pytest.approx(float(at_once["grad_norm"]), rel=SUMS)
    assert (step["stepped"], step["lr"]) == (True, 0.1)
    assert min(losses) < float(at_once["loss"]) < max(losses)
    for name, parameter in parameters(policy).items():
        # Weights of about 1, of plain SGD.
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=SUMS, msg=name)
    policy.load_checkpoint(tmp_path / "weights")


def test_pending_gradients_outlast_what_comes_between_and_are_not_lost(policy, tmp_path):
    data = batch(SPLIT_LENGTHS)
    policy.save_checkpoint(tmp_path / "weights")
    expected = in_calls(policy, data, NLLLoss(), (0, 7))[1]["grad_norm"]
    policy.load_checkpoint(tmp_path / "weights")
    with pytest.raises(ResidencyError, match=r"call forward_backward\(\) first"):
        policy.optimizer_step()
    result = policy.forward_backward(data, NLLLoss())
    assert (result["grad_norm"], result["loss"].shape) == (None, (1,))
    assert sum(result["all_mb_metrics"]["num_valid_samples"]) == data.size
    assert "lr" not in result["all_mb_metrics"]
    policy.generate(batch([3, 2], width=3))
    policy.train(data, NLLLoss(), eval_mode=True)
    policy.save_checkpoint(tmp_path / "between")
    for call in (
        lambda: policy.train(data, NLLLoss()),
        lambda: policy.load_checkpoint(tmp_path / "weights"),
        policy.offload_before_refit,
        policy.offload_after_refit,
        policy.prepare_for_lp_inference,
    ):
        with pytest.raises(ResidencyError, match=r"optimizer_step\(\) or zero_grad\(\) first"):
            call()
    with pytest.raises(ValueError, match="loss_type=SEQUENCE_LEVEL"):
        policy.forward_backward(data, ClippedPGLoss(loss_type=LossType.SEQUENCE_LEVEL))
    assert policy.optimizer_step()["grad_norm"] == pytest.approx(expected, rel=SUMS)
    with pytest.raises(ResidencyError, match=r"call forward_backward\(\) first"):
        policy.optimizer_step()
    policy.forward_backward(data, NLLLoss())
    policy.zero_grad()
    policy.offload_before_refit()
    with pytest.raises(ResidencyError, match=r"prepare_for_training\(\) first"):
        policy.forward_backward(data, NLLLoss())
    policy.prepare_for_training()
    policy.load_checkpoint(tmp_path / "weights")


PLANNED_LENGTHS = [9, 2, 5, 7, 1, 8, 3]


@pytest.fixture(scope="module")
def fixed_losses(cluster, model_path, tokenizer):
    """Return the losses of two calls with micro-batches of a fixed number of rows."""
    policy = Policy(cluster, config(model_path), tokenizer)
    try:
        return [policy.train(batch(PLANNED_LENGTHS), NLLLoss())["loss"] for _ in range(2)]
    finally:
        policy.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
def test_planned_micro_batches_give_what_fixed_ones_give(
    cluster, model_path, tokenizer, plain_model, fixed_losses, section
):
    data = batch(PLANNED_LENGTHS)
    before = data.writable()
    budgets = {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 12}
    if section == "dynamic_batching":
        budgets["sequence_length_round"] = 4
    policy = Policy(cluster, config(model_path, **{section: budgets}), tokenizer)
    try:
        scores = policy.get_logprobs(data)["logprobs"]
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        planned = [policy.train(data, NLLLoss())["loss"] for _ in range(2)]
        with pytest.raises(ValueError, match=f"mbs=2 contradicts policy.{section}.train"):
            policy.train(data, NLLLoss(), mbs=2)
        with pytest.raises(
            ValueError, match=rf"policy.{section}.logprob_mb_tokens: .*_tokens.*=12"
        ):
            policy.get_logprobs(batch([13], width=14))
    finally:
        policy.shutdown()
    expected = expected_logprobs(plain_model, data)
    assert_close(scores, expected)
    assert_close(reference, expected)
    torch.testing.assert_close(planned, fixed_losses, rtol=SUMS, atol=0)
    assert data == before


@pytest.mark.promise
def test_a_checkpoint_brings_weights_and_optimizer_back(policy, tmp_path):
    data = batch([9, 2, 5, 7])
    policy.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer", tmp_path / "tokenizer")
    before = policy.get_logprobs(data)["logprobs"]
    first = policy.train(data, NLLLoss())
    assert not torch.equal(policy.get_logprobs(data)["logprobs"], before)
    policy.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    assert torch.equal(policy.get_logprobs(data)["logprobs"], before)
    again = policy.train(data, NLLLoss())
    assert torch.equal(first["loss"], again["loss"])
    policy.load_checkpoint(tmp_path / "weights")


@pytest.mark.parametrize("transport", ["shm", "collective"])
@pytest.mark.promise
def test_receivers_get_the_weights_by_stream(policy, transport):
    expected = parameters(policy)
    addresses = policy.open_refit(2, is_paired=True, transport=transport, bucket_bytes=1 << 14)
    receivers = [
        RefitReceiver(address, rank, timeout_s=PATIENCE_S) for rank, address in enumerate(addresses)
    ]
    loaded = [{}, {}]

    def receive(rank, version):
        receivers[rank].begin(version)
        receivers[rank].receive(
            version, lambda tensors: loaded[rank].update((n, t.clone()) for n, t in tensors)
        )

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(receive, rank, 1) for rank in range(2)]
        metrics = policy.send_weights(1)
        for future in running:
            future.result(timeout=PATIENCE_S)
        for receiver in receivers:
            receiver.commit(1)
        for tensors in loaded:
            assert list(tensors) == list(expected)
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert metrics["refit_bytes"] == sum(tensor.nbytes for tensor in expected.values())

        # One that fails makes the refit fail for all, and the next one succeeds.
        def fail(tensors):
            raise OSError("planted")

        receivers[0].begin(2)
        running = [pool.submit(receivers[0].receive, 2, fail), pool.submit(receive, 1, 2)]
        with pytest.raises(RefitError, match="planted"):
            policy.send_weights(2)
        with pytest.raises(RefitError, match="planted"):
            running[0].result(timeout=PATIENCE_S)
        # With a sender of its own the other one has all of it; with the same one, it failed too.
        assert (
            running[1].exception(timeout=PATIENCE_S) is None or policy.worker_group.world_size == 1
        )
        for receiver in receivers:
            with pytest.raises((PoisonedError, RefitInProgress)):
                receiver.require_ready()
        running = [pool.submit(receive, rank, 3) for rank in range(2)]
        policy.send_weights(3)
        for future in running:
            future.result(timeout=PATIENCE_S)
    for receiver in receivers:
        receiver.commit(3)
        assert receiver.require_ready() == 3
        receiver.close()


def test_a_collective_to_engines_on_the_ranks_own_gpus_is_refused(policy, monkeypatch):
    monkeypatch.setattr(Policy, "_is_on_gpu", True)
    with pytest.raises(ValueError, match="NCCL refuses two ranks on one GPU, use"):
        policy.open_refit(2, is_paired=True, transport="collective")


def test_engines_on_other_machines_find_the_sender(policy, cluster):
    address, *_ = policy.open_refit(2, transport="collective")
    node, _ = cluster.get_master_address_and_port()
    assert address["endpoint"].rpartition(":")[0] == f"tcp:{node}"


def test_handles_are_rebuilt_in_another_process(policy):
    expected = parameters(policy)
    info = policy.prepare_refit_info()
    assert info == {name: (tuple(t.shape), t.dtype) for name, t in expected.items()}
    assert policy.prepare_info_for_collective() == info
    assert policy.prepare_weights_for_ipc(_refit_buffer_size_gb=1) == [list(expected)]
    names = list(expected)
    for group in (names[:3], names[3:]):
        answer = policy.get_weights_ipc_handles(group)
        assert set(answer) == {info["global_device_id"] for info in policy.get_gpu_info()}
        (handles,) = answer.values()
        assert list(handles) == group
        for name, handle in handles.items():
            assert torch.equal(rebuild(handle), expected[name])
        kept = handles
    policy.offload_after_refit()
    with pytest.raises(RuntimeError, match=r"[Ii]ts owner has closed it"):
        rebuild(next(iter(kept.values())))
    policy.prepare_for_training()


def test_a_group_that_the_driver_names_gets_the_weights(policy):
    expected = parameters(policy)
    info = policy.prepare_info_for_collective()
    with ReservedPort() as port:
        joining = policy.init_collective("127.0.0.1", port.number, 2)
        with BroadcastGroup(
            "127.0.0.1", port.number, rank=1, world_size=2, timeout_s=PATIENCE_S
        ) as group:
            ray.get(joining, timeout=PATIENCE_S)
            sending = policy.broadcast_weights_for_collective()
            received = dict(group.receive(info))
            ray.get(sending, timeout=PATIENCE_S)
    assert list(received) == list(expected)
    assert all(torch.equal(received[name], expected[name]) for name in expected)


def parameters(policy):
    """Return the policy's parameters by way of a checkpoint for transformers."""
    with tempfile.TemporaryDirectory() as directory:
        policy.save_hf_checkpoint(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return {name: tensor.detach() for name, tensor in model.named_parameters()}


def test_states_hold_and_offloading_changes_nothing(policy):
    data = batch([9, 2, 5, 7])
    before = policy.get_logprobs(data)["logprobs"]
    policy.offload_before_refit()
    policy.offload_after_refit()
    with pytest.raises(ResidencyError, match="offloaded"):
        policy.get_logprobs(data)
    policy.prepare_for_lp_inference()
    assert torch.equal(policy.get_logprobs(data)["logprobs"], before)
    policy.prepare_for_training()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_global_batch_size": 3}, "policy.train_global_batch_size=3"),
        ({"model_name": "./nowhere"}, "policy.model_name='./nowhere'"),
        ({"dtensor_cfg": {"enabled": True, "tensor_parallel_size": 3}}, "does not divide"),
        ({"optimizer": None}, "policy.optimizer is not set"),
    ],
)
def test_a_config_that_the_worker_refuses_starts_nothing(model_path, tokenizer, changes, message):
    untouched = RayVirtualCluster([2], use_gpus=False)
    with pytest.raises(ValueError, match=message):
        Policy(untouched, config(model_path, **changes), tokenizer)
    assert untouched._placement_groups is None
