"""New weights that arrive while real vLLM engines sample, from a sender in this process."""

import copy
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import rl_refit
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from rl_interfaces import NOT_SAMPLED
from rl_policy.generation.state import EngineStateError
from rl_policy.generation.vllm import VllmGeneration
from rl_refit.testing import DrillSender, Fault
from vllm_oracles import (
    TEXTS,
    TOLERANCE,
    endless_tokenizer,
    expected_logprobs,
    generation_config,
    long_llama,
    prompts_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.needs("rl-policy[vllm]")]

# Engines cannot import this module, whose functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

WRONG = 1e-2
NEW_TOKENS = 500
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def tokenizer():
    return endless_tokenizer()


@pytest.fixture(scope="module")
def first_model(tokenizer):
    return long_llama(tokenizer)


@pytest.fixture(scope="module")
def engines(tmp_path_factory, tokenizer, first_model, shared_ray):
    path = tmp_path_factory.mktemp("llama")
    first_model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    cluster = kept_cluster([2])
    config = generation_config(path, max_model_len=1024, engine_kwargs={"block_size": 32})
    config = config | {"max_new_tokens": NEW_TOKENS, "temperature": TEMPERATURE}
    engines = VllmGeneration(cluster, config, tokenizer, timeout_s=PATIENCE_S)
    # The first staged refit takes its memory.
    with open_sender(engines, first_model) as sender:
        staged_refit(engines, sender, 0)
    yield engines
    engines.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def models(first_model):
    """The models of the versions that were sent."""
    return {0: first_model}


@pytest.fixture
def new_model(models):
    """Return a function that makes the model of a version."""

    def make(version):
        model = copy.deepcopy(models[0])
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return model

    return make


def open_sender(engines, model, sender_class=rl_refit.RefitSender):
    sender = sender_class(
        rl_refit.TensorSource(model.state_dict()),
        num_receivers=engines.num_receivers,
        timeout_s=PATIENCE_S,
        bucket_bytes=32 << 10,
    )
    engines.init_transfer(sender.address)
    return sender


def staged_refit(engines, sender, version, **options):
    engines.begin_update(version, staging="host", **options)
    call = engines.update(version)
    sender.send(version)
    reports = engines.wait_for_update(call)
    engines.commit_update(version)
    sender.commit(version)
    return reports


def start_sampling(pool, engines, tokenizer):
    """Call `generate` in a thread; return its future once every engine samples."""
    sampling = pool.submit(engines.generate, prompts_of(tokenizer, TEXTS))
    while not all(engines.membership.on_all_beside("is_sampling")):
        assert not sampling.done()
    return sampling


def sample_shortly(engines, tokenizer):
    """Return completions that end at one of some characters, long before their limit."""
    stops = [list("abcdef")] * len(TEXTS)
    return engines.generate(prompts_of(tokenizer, TEXTS, stop_strings=stops))


def refit_while_sampling(engines, tokenizer, models, new_model, **options):
    """Refit again and again while one call of `generate` runs; return its output."""
    with ThreadPoolExecutor(1) as pool:
        sampling = start_sampling(pool, engines, tokenizer)
        while not sampling.done():
            version = engines.weight_version + 1
            models[version] = new_model(version)
            with open_sender(engines, models[version]) as sender:
                reports = staged_refit(engines, sender, version, **options)
            assert all(report["refit_staged"] for report in reports)
            assert not any(report["refit_pause_s"] for report in reports)
        return sampling.result()


def errors_by_version(output, models):
    """Return the largest error of the log-probabilities under each version's model."""
    found = {}
    versions = output["weight_versions"]
    for version in set(versions[versions != NOT_SAMPLED].tolist()):
        expected = expected_logprobs(models[version], output, temperature=TEMPERATURE)
        of_version = versions == version
        found[version] = (output["logprobs"] - expected)[of_version].abs().max().item()
    return found


def require_versions(output):
    """Check the columns of versions by themselves; return how many rows span a swap."""
    versions = output["weight_versions"]
    assert versions.dtype == torch.int64
    assert versions.shape == output["output_ids"].shape
    spanning = 0
    for row, oldest in enumerate(output["weight_version"].tolist()):
        end = int(output["unpadded_sequence_lengths"][row])
        start = end - int(output["generation_lengths"][row])
        sampled = versions[row, start:end].tolist()
        assert sampled == sorted(sampled)
        assert sampled[0] == oldest
        assert (versions[row, :start] == NOT_SAMPLED).all()
        assert (versions[row, end:] == NOT_SAMPLED).all()
        spanning += len(set(sampled)) > 1
    return spanning


def test_every_token_is_of_one_version_and_says_of_which(engines, tokenizer, models, new_model):
    output = refit_while_sampling(engines, tokenizer, models, new_model)
    assert (output["generation_lengths"] == NEW_TOKENS).all()
    assert require_versions(output) == len(TEXTS)
    errors = errors_by_version(output, models)
    assert len(errors) > 1
    assert max(errors.values()) < TOLERANCE
    # That the versions can be told apart at all.
    others = {version: models[0 if version else max(models)] for version in errors}
    assert min(errors_by_version(output, others).values()) > WRONG
    metrics = engines.update_metrics()
    assert metrics["refit_staged"] == 1
    assert metrics["refit_pause_s"] > 0


def test_requests_may_keep_their_cache_and_later_ones_do_not_find_it(
    engines, tokenizer, models, new_model
):
    output = refit_while_sampling(engines, tokenizer, models, new_model, kv_cache="keep")
    assert require_versions(output) == len(TEXTS)
    errors = errors_by_version(output, models)
    first, *later = sorted(errors)
    assert errors[first] < TOLERANCE
    # Keys and values of earlier weights: not what a model of one version computes.
    assert max(errors[version] for version in later) > WRONG
    again = sample_shortly(engines, tokenizer)
    assert require_versions(again) == 0
    errors = errors_by_version(again, models)
    assert list(errors) == [engines.weight_version]
    assert max(errors.values()) < TOLERANCE


class Breaks:
    """A source whose pass breaks when a layer is complete and another is not."""

    def __init__(self, model):
        self._source = rl_refit.TensorSource(model.state_dict())

    def metadata(self):
        return self._source.metadata()

    def __iter__(self):
        for count, pair in enumerate(self._source):
            if count == 14:
                raise RuntimeError("the trainer broke")
            yield pair


class FlipsABit(Fault):
    def spoil(self, bucket, data):
        if bucket == 3:
            data[100] ^= 4


def fail_by_source(engines, model, version):
    with open_sender(engines, model) as sender:
        sender._source = Breaks(model)
        engines.begin_update(version, staging="host")
        call = engines.update(version)
        with pytest.raises(RuntimeError, match="the trainer broke"):
            sender.send(version)
        with pytest.raises(rl_refit.RefitError, match="the trainer broke"):
            engines.wait_for_update(call)


def fail_by_corruption(engines, model, version):
    with (
        open_sender(engines, model, DrillSender) as sender,
        sender.tampered(FlipsABit(), timeout_s=PATIENCE_S),
    ):
        engines.begin_update(version, staging="host")
        call = engines.update(version)
        with pytest.raises(rl_refit.RefitError, match="digest"):
            sender.send(version)
        with pytest.raises(rl_refit.RefitError, match="digest"):
            engines.wait_for_update(call)


def send_and_die(pipe, tensors, num_receivers, version):
    """Send the first half, and be killed."""

    class Dies:
        def metadata(self):
            return rl_refit.TensorSource(tensors).metadata()

        def __iter__(self):
            for count, pair in enumerate(tensors.items()):
                if count == 14:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield pair

    sender = rl_refit.RefitSender(
        Dies(), num_receivers=num_receivers, timeout_s=PATIENCE_S, bucket_bytes=32 << 10
    )
    pipe.send(dict(sender.address))
    pipe.recv()
    sender.send(version)


def fail_by_death(engines, model, version):
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=send_and_die, args=(theirs, model.state_dict(), engines.num_receivers, version)
    )
    process.start()
    theirs.close()
    assert pipe.poll(PATIENCE_S)
    engines.init_transfer(pipe.recv())
    engines.begin_update(version, staging="host")
    call = engines.update(version)
    pipe.send("begin")
    with pytest.raises(rl_refit.RefitError, match="the sender is gone"):
        engines.wait_for_update(call)
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("fail", [fail_by_source, fail_by_corruption, fail_by_death])
def test_a_failed_transfer_leaves_the_old_version_sampling(
    engines, tokenizer, models, new_model, fail
):
    kept = engines.weight_version
    with ThreadPoolExecutor(1) as pool:
        sampling = start_sampling(pool, engines, tokenizer)
        fail(engines, new_model(kept + 1), kept + 1)
        during = sampling.result()
    after = sample_shortly(engines, tokenizer)
    for output in (during, after):
        assert require_versions(output) == 0
        errors = errors_by_version(output, models)
        assert list(errors) == [kept]
        assert errors[kept] < TOLERANCE
    with pytest.raises(EngineStateError, match="while the weights are committed"):
        engines.commit_update(kept + 1)
    # The next one needs no repair.
    models[kept + 1] = new_model(kept + 1)
    with open_sender(engines, models[kept + 1]) as sender:
        staged_refit(engines, sender, kept + 1)
    output = sample_shortly(engines, tokenizer)
    assert errors_by_version(output, models) == {kept + 1: pytest.approx(0, abs=TOLERANCE)}


def fill_room(worker):
    """Let a worker find no room for staged weights, the next time."""
    engine = worker.weight_transfer_engine
    room = engine.find_room

    def none(*, only_host):
        del engine.find_room
        return type(room(only_host=only_host))(place=None, reason="the host is full")

    engine.find_room = none


def on_first_engine(engines, function):
    call = engines._group._hosts[0].call.remote("_on_workers", True, function)
    return ray.get(call, timeout=PATIENCE_S)


def test_an_engine_without_room_pauses_and_says_so(engines, tokenizer, models, new_model):
    version = engines.weight_version + 1
    models[version] = new_model(version)
    with open_sender(engines, models[version]) as sender:
        on_first_engine(engines, fill_room)
        with pytest.raises(ValueError, match="is not possible: engine 0: the host is full"):
            engines.begin_update(version, staging="host")
        on_first_engine(engines, fill_room)
        engines.begin_update(version, staging="auto")
        with pytest.raises(EngineStateError, match="on their way"):
            engines.generate(prompts_of(tokenizer, TEXTS))
        call = engines.update(version)
        sender.send(version)
        engines.wait_for_update(call)
        engines.commit_update(version)
        sender.commit(version)
    assert engines.update_metrics()["refit_staged"] == 0
    output = engines.generate(prompts_of(tokenizer, TEXTS))
    assert errors_by_version(output, models) == {version: pytest.approx(0, abs=TOLERANCE)}


def test_an_update_without_staging_waits_for_the_requests(engines, tokenizer, models, new_model):
    version = engines.weight_version + 1
    models[version] = new_model(version)
    with open_sender(engines, models[version]) as sender, ThreadPoolExecutor(1) as pool:
        sampling = start_sampling(pool, engines, tokenizer)
        engines.begin_update(version)
        assert require_versions(sampling.result()) == 0
        call = engines.update(version)
        sender.send(version)
        engines.wait_for_update(call)
        engines.commit_update(version)
        sender.commit(version)
    assert engines.update_metrics()["refit_staged"] == 0
    assert errors_by_version(sampling.result(), models)[version - 1] < TOLERANCE
