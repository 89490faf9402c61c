"""New weights for real vLLM engines, from a sender in this process."""

import sys
from contextlib import ExitStack

import pytest
import ray
import rl_refit
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from rl_interfaces.backend.runtime import ReservedPort
from rl_policy.generation.state import EngineStateError
from rl_policy.generation.vllm import VllmGeneration
from rl_refit.compat import broadcast, handles
from transformers import AutoModelForCausalLM
from vllm_oracles import (
    TEXTS,
    TOLERANCE,
    ascii_tokenizer,
    expected_logprobs,
    fail_to_refit,
    generation_config,
    prompts_of,
    refit,
    save_llama,
)

pytestmark = [pytest.mark.vllm, pytest.mark.needs("rl-policy[vllm]")]

# Engines cannot import this module, whose functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Not a coincidence of rounding: with the wrong weights a log-probability is off by far more.
WRONG = 1e-2


@pytest.fixture(scope="module")
def tokenizer():
    return ascii_tokenizer()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, tokenizer)
    return path


@pytest.fixture(scope="module")
def engines(model_path, tokenizer, shared_ray):
    cluster = kept_cluster([2])
    # Small blocks, so that a prompt fills some and the cache of prefixes has something to give.
    config = generation_config(model_path, engine_kwargs={"block_size": 32})
    engines = VllmGeneration(cluster, config, tokenizer, timeout_s=PATIENCE_S)
    yield engines
    engines.shutdown()
    cluster.shutdown()


@pytest.fixture
def model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture
def next_version(engines):
    return engines.weight_version + 1


def change(model, seed):
    """Change every parameter, as training steps would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def make_sender(engines, source, transport="shm"):
    sender = rl_refit.RefitSender(
        source,
        transport=transport,
        num_receivers=engines.num_receivers,
        timeout_s=PATIENCE_S,
        bucket_bytes=32 << 10,
    )
    engines.init_transfer(sender.address)
    return sender


def mismatch(engines, model, tokenizer):
    """Return the largest error of the log-probabilities under `model`, and the versions."""
    output = engines.generate(prompts_of(tokenizer, TEXTS))
    expected = expected_logprobs(model, output, temperature=0.7)
    error = (output["logprobs"] - expected).abs().max().item()
    return error, set(output["weight_version"].tolist())


class Faulty:
    """A source whose pass breaks when a layer is complete and another is not."""

    def __init__(self, source):
        self._source = source

    def metadata(self):
        return self._source.metadata()

    def __iter__(self):
        for count, pair in enumerate(self._source):
            if count == 14:
                raise RuntimeError("the trainer broke")
            yield pair


@pytest.mark.parametrize("transport", ["shm", "collective", "golden"])
@pytest.mark.promise
def test_after_a_refit_samples_are_those_of_the_new_weights(
    engines, model, tokenizer, next_version, transport
):
    change(model, seed=next_version)
    before, versions = mismatch(engines, model, tokenizer)
    assert before > WRONG
    assert versions == {next_version - 1}
    with make_sender(engines, rl_refit.TensorSource(model.state_dict()), transport) as sender:
        reports = refit(engines, sender, next_version)
        after, versions = mismatch(engines, model, tokenizer)
        assert after < TOLERANCE
        assert versions == {next_version} == {engines.weight_version}
        assert len(reports) == engines.num_receivers
        total = sum(parameter.numel() * 4 for parameter in model.parameters())
        assert all(report["refit_bytes"] >= total for report in reports)
        # The same connection serves the next one.
        change(model, seed=100 + next_version)
        assert mismatch(engines, model, tokenizer)[0] > WRONG
        refit(engines, sender, next_version + 1)
        assert mismatch(engines, model, tokenizer) == (
            pytest.approx(0, abs=TOLERANCE),
            {next_version + 1},
        )


def test_what_was_computed_with_old_weights_is_not_reused(engines, model, tokenizer, next_version):
    # More than a block of the cache, so that a prefix could be taken from it.
    prompts = prompts_of(tokenizer, ["a prompt that is longer than its block"])
    engines.generate(prompts, greedy=True)
    change(model, seed=7)
    with make_sender(engines, rl_refit.TensorSource(model.state_dict())) as sender:
        refit(engines, sender, next_version)
    output = engines.generate(prompts, greedy=True)
    expected = expected_logprobs(model, output)
    torch.testing.assert_close(output["logprobs"], expected, atol=TOLERANCE, rtol=0)


def test_nothing_is_sampled_until_the_weights_are_committed(
    engines, model, tokenizer, next_version
):
    prompts = prompts_of(tokenizer, TEXTS)
    with make_sender(engines, rl_refit.TensorSource(model.state_dict())) as sender:
        engines.begin_update(next_version)
        with pytest.raises(EngineStateError, match="are on their way"):
            engines.generate(prompts)
        with pytest.raises(EngineStateError, match="not all weights have arrived"):
            engines.commit_update(next_version)
        call = engines.update(next_version)
        sender.send(next_version)
        engines.wait_for_update(call)
        with pytest.raises(EngineStateError, match="are on their way"):
            engines.generate(prompts)
        # A driver that begins anew instead of committing.
        change(model, seed=8)
        refit(engines, sender, next_version + 1)
    assert mismatch(engines, model, tokenizer)[0] < TOLERANCE


def test_after_a_failed_refit_nothing_is_sampled_until_a_full_one(
    engines, model, tokenizer, next_version
):
    change(model, seed=9)
    source = rl_refit.TensorSource(model.state_dict())
    with make_sender(engines, Faulty(source)) as sender:
        engines.begin_update(next_version)
        call = engines.update(next_version)
        with pytest.raises(RuntimeError, match="the trainer broke"):
            sender.send(next_version)
        with pytest.raises(rl_refit.RefitError, match="the trainer broke"):
            engines.wait_for_update(call)
    with pytest.raises(EngineStateError, match=f"the refit to version {next_version} failed"):
        engines.generate(prompts_of(tokenizer, TEXTS))
    assert engines.weight_version == next_version - 1
    with make_sender(engines, source) as sender:
        refit(engines, sender, next_version)
    error, versions = mismatch(engines, model, tokenizer)
    assert error < TOLERANCE
    assert versions == {next_version}


def break_once(worker, method):
    """Let a method of a worker's transfer engine fail the next time."""
    engine = worker.weight_transfer_engine

    def fail(*args):
        delattr(engine, method)
        raise RuntimeError(f"no room for {method}")

    setattr(engine, method, fail)


def placeholders(worker):
    """Return the worker's parameters that have no memory."""
    model = worker.weight_transfer_engine.model
    return [name for name, value in model.named_parameters() if value.is_meta]


def on_workers_of(engines, index, function, *args):
    call = engines._group._hosts[index].call.remote("_on_workers", True, function, *args)
    return ray.get(call, timeout=PATIENCE_S)


def test_where_one_engine_fails_at_the_end_none_is_committed(
    engines, model, tokenizer, next_version
):
    change(model, seed=12)
    with make_sender(engines, rl_refit.TensorSource(model.state_dict())) as sender:
        # Everything is loaded, and vLLM fails to end its update.
        on_workers_of(engines, 1, break_once, "finish_weight_update")
        engines.begin_update(next_version)
        call = engines.update(next_version)
        sender.send(next_version)
        with pytest.raises(RuntimeError, match="no room for finish_weight_update"):
            engines.wait_for_update(call)
        with pytest.raises(EngineStateError, match=r"are on their way|no room for finish"):
            engines.generate(prompts_of(tokenizer, TEXTS))
        # vLLM fails to process what has come, which all hear of before they take it for loaded.
        on_workers_of(engines, 0, break_once, "_complete")
        fail_to_refit(engines, sender, next_version, told="no room for _complete")
        # Engines that were ready to commit the version have not, and take it again.
        refit(engines, sender, next_version)
        engines.commit_update(next_version)
    error, versions = mismatch(engines, model, tokenizer)
    assert error < TOLERANCE
    assert versions == {next_version}


def test_a_refit_that_is_given_up_for_sleep_can_be_repeated(
    engines, model, tokenizer, next_version
):
    change(model, seed=13)
    state = model.state_dict()
    engines.prepare_refit_info(info_of(model))
    with handles.HandleOwner() as owner:
        engines.begin_update(next_version)
        engines.update_weights({"this machine": owner.export(dict(list(state.items())[:5]))})
        assert engines.finish_generation()
        assert engines.prepare_for_generation()
        with pytest.raises(EngineStateError, match="was abandoned for the engine's sleep"):
            engines.generate(prompts_of(tokenizer, TEXTS))
        assert on_workers_of(engines, 0, placeholders) == [[]]
        engines.begin_update(next_version)
        engines.update_weights({"this machine": owner.export(state)})
        engines.commit_update(next_version)
    error, versions = mismatch(engines, model, tokenizer)
    assert error < TOLERANCE
    assert versions == {next_version}


def load_one_and_forget(worker, exported):
    """Leave a reload open of which vLLM knows nothing any more."""
    name, tensor = next(iter(exported.items()))
    worker.start_weight_update()
    rl_refit.vllm.load(worker, [(name, tensor)])
    worker.worker._weight_update_active = False
    with pytest.raises(rl_refit.RefitError, match="outside start_weight_update"):
        rl_refit.vllm.load(worker, [(name, tensor)])
    return worker.weight_transfer_engine._reload is not None


def test_a_reload_that_vllm_has_forgotten_is_given_up_by_the_next(
    engines, model, tokenizer, next_version
):
    change(model, seed=14)
    state = model.state_dict()
    name = "model.layers.0.self_attn.k_proj.weight"
    wrong = {name: torch.full_like(state[name], 7.0)}
    assert on_workers_of(engines, 0, load_one_and_forget, wrong) == [True]
    engines.prepare_refit_info(info_of(model))
    with handles.HandleOwner() as owner:
        engines.begin_update(next_version)
        assert on_workers_of(engines, 0, placeholders) == [[]]
        engines.update_weights({"this machine": owner.export(state)})
        engines.commit_update(next_version)
    error, versions = mismatch(engines, model, tokenizer)
    assert error < TOLERANCE
    assert versions == {next_version}


def info_of(model):
    return {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}


def test_weights_arrive_by_handles_group_by_group(engines, model, tokenizer, next_version):
    change(model, seed=10)
    assert mismatch(engines, model, tokenizer)[0] > WRONG
    state = model.state_dict()
    names = list(state)
    engines.prepare_refit_info(info_of(model))
    with handles.HandleOwner() as owner:

        def hand_over(group):
            exported = owner.export({name: state[name] for name in group})
            assert engines.update_weights({"this machine": exported})

        engines.begin_update(next_version)
        hand_over(names[:7])
        with pytest.raises(EngineStateError, match="not all weights have arrived"):
            engines.commit_update(next_version)
        # Given up half-way, and begun anew.
        engines.begin_update(next_version)
        hand_over(names[:5])
        hand_over(names[5:])
        engines.commit_update(next_version)
    error, versions = mismatch(engines, model, tokenizer)
    assert error < TOLERANCE
    assert versions == {next_version}


def test_weights_arrive_over_a_group_of_the_drivers(engines, model, tokenizer, next_version):
    change(model, seed=11)
    engines.prepare_refit_info(info_of(model))
    world_size = engines.num_receivers + 1
    with pytest.raises(ValueError, match="world_size=2 does not fit 2 receivers"):
        engines.init_collective("127.0.0.1", 1, 2)
    with ExitStack() as open_things:
        port = open_things.enter_context(ReservedPort()).number
        joining = engines.init_collective("127.0.0.1", port, world_size)
        group = open_things.enter_context(
            broadcast.BroadcastGroup(
                "127.0.0.1", port, rank=0, world_size=world_size, timeout_s=PATIENCE_S
            )
        )
        ray.get(joining)
        for version in (next_version, next_version + 1):
            change(model, seed=20 + version)
            assert mismatch(engines, model, tokenizer)[0] > WRONG
            engines.begin_update(version)
            receiving = engines.update_weights_from_collective()
            group.send(model.state_dict().items())
            ray.get(receiving)
            engines.commit_update(version)
            error, versions = mismatch(engines, model, tokenizer)
            assert error < TOLERANCE
            assert versions == {version}


def test_an_old_version_is_refused_and_the_engines_go_on(engines, tokenizer):
    with pytest.raises(ValueError, match="is not newer than version"):
        engines.begin_update(engines.weight_version)
    engines.generate(prompts_of(tokenizer, TEXTS))


def test_as_many_addresses_as_receivers_are_needed(engines):
    with pytest.raises(ValueError, match="1 addresses do not fit 2 receivers"):
        engines.init_transfer([{}])
