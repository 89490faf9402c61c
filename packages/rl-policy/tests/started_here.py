"""A run's start in this process: what is accepted is built here, and steps once."""

import os
import socket
from contextlib import contextmanager

import torch
from rl_policy import backends
from rl_policy.config import parse_run_config
from rl_policy.data.tiny_model import build_tiny_model, tiny_model_config
from rl_policy.dispatch import Dispatcher
from rl_policy.losses import NLLLoss, ValueLoss
from rl_policy.ray.cluster import RayVirtualCluster
from rl_policy.recipes import find_recipe
from rl_policy.run.directory import RunDirectory

# Beyond this, a model is built without its values, and no rank is started.
MOST_WEIGHTS = 2_000_000
SIZES = ("tensor_parallel_size", "context_parallel_size", "data_parallel_replicate_size")
# Of a batch that a rank trains on; a larger one is as many more of the same.
MOST_ROWS = 8


def start_run(inputs, directory):
    """Do what a run does when it starts, with one rank in this process instead of Ray's.

    The devices' shape and the layout are those of the configuration, as are the model, optimizer,
    schedule, loss, tokens and rewards; the rank trains a step, scores and samples.
    """
    config = inputs.config
    assert parse_run_config(config.model_dump()) == config
    assert RunDirectory(directory.path).read_config() == config
    recipe = find_recipe(config.recipe)
    cluster = RayVirtualCluster(**config.cluster.arguments())
    worker_class = backends.load(backends.enabled_backend(config.policy))
    model = config.policy["model_name"]
    is_small = True
    if config.has_builtin_model:
        length = config.policy["max_total_sequence_length"]
        shape = tiny_model_config(config.tiny_model, max_sequence_length=length)
        width = shape.hidden_size * (4 * shape.hidden_size + 3 * shape.intermediate_size)
        is_small = shape.num_hidden_layers * width < MOST_WEIGHTS
        model = str(directory.tiny_model)
        if is_small:
            build_tiny_model(directory.tiny_model, config=shape, seed=config.seed)
        else:
            shape.save_pretrained(model)
    batch = batch_of(inputs)
    for policy in recipe.policies(config).values():
        settings = {**policy, "model_name": model}
        layout = worker_class.validate_config(
            settings, world_size=cluster.world_size(), init_optimizer=True
        )
        assert layout.world_size == cluster.world_size()
        dispatcher = Dispatcher(settings, data_parallel=layout.data_parallel)
        plans, size = dispatcher.plan_training(batch, NLLLoss(), gbs=None, mbs=None)
        assert (len(plans), size) == (layout.data_parallel, policy["train_global_batch_size"])
        if is_small and backends.enabled_backend(policy) == "dtensor":
            one_rank(worker_class, settings, inputs, batch)


def batch_of(inputs):
    """Return prompts with answers that a recipe would train on."""
    if hasattr(inputs, "pairs"):
        rows = [row for pair in inputs.pairs.train[: MOST_ROWS // 2] for row in pair.rows]
    else:
        rows = list(inputs.problems.train[:MOST_ROWS])
        rewards = inputs.reward([row.answer for row in rows], rows)
        assert all(0 <= reward <= 1 for reward in rewards)
    return inputs.encoder.answer_batch(rows)


def one_rank(worker_class, policy, inputs, batch):
    """Train a step, score and sample with one rank of a policy, in this process."""
    section = {**policy["dtensor_cfg"], **dict.fromkeys(SIZES, 1), "sequence_parallel": False}
    section.pop("custom_parallel_plan", None)
    size = min(policy["train_global_batch_size"], len(batch["input_ids"]))
    has_values = policy.get("head") == "value"
    loss = ValueLoss() if has_values else NLLLoss()
    if has_values:
        # What the loss learns, and moves away from.
        batch = batch.copy()
        batch.update(dict.fromkeys(("returns", "prev_values"), batch["token_mask"].float()))
    settings = {**policy, "dtensor_cfg": section}
    dispatcher = Dispatcher(settings, data_parallel=1)
    with environment_of_one_rank():
        worker = worker_class(settings, inputs.tokenizer, init_reference_model=False)
    try:
        (plan,), _ = dispatcher.plan_training(batch, loss, gbs=size, mbs=None)
        shard = batch.apply_plan(plan)
        result = worker.train(shard, loss, gbs=size, mbs=None)
        assert torch.isfinite(result["global_loss"]).all()
        worker.prepare_for_lp_inference()
        (plan,), _ = dispatcher.plan_scoring(batch)
        shard = batch.apply_plan(plan)
        if has_values:
            assert torch.isfinite(worker.score(shard)["scores"]).all()
        else:
            assert torch.isfinite(worker.get_logprobs(shard)["logprobs"]).all()
        if "generation" in policy:
            prompts = {key: batch[key][:2, :1] for key in ("input_ids",)}
            prompts["input_lengths"] = torch.ones(2, dtype=torch.int64)
            generated = worker.generate(type(batch)(prompts))
            assert generated["output_ids"].shape[0] == 2
    finally:
        worker.shutdown()


@contextmanager
def environment_of_one_rank():
    """Set what torchrun sets for a world of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
