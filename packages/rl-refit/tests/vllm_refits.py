"""Refit a real vLLM engine and compare it with transformers; run by `test_vllm.py`.

Usage: python vllm_refits.py TRANSPORT[,TRANSPORT] tied|untied TENSOR_PARALLEL_SIZE DIRECTORY
"""

# ruff: noqa: T201

import copy
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import vllm
from patience import PATIENCE_S
from rl_refit import PoisonedError, RefitError, RefitSender, TensorSource
from rl_refit.vllm import (
    find_room,
    flip,
    init_info,
    is_staged,
    on_workers,
    release_staging,
    require_ready,
    stage,
)
from rl_refit.vllm import refit as receive_on_workers
from rl_refit.vllm.reload import LayerwiseReload
from tolerances import ENGINE
from transformers import LlamaConfig, LlamaForCausalLM

SAME = ENGINE
OTHER = 1e-2
# What is left out, and how vLLM's parameter is named that lacks it.
OMISSIONS = {
    "model.layers.1.self_attn.k_proj.weight": "layers.1.self_attn.qkv_proj.weight (shard k)",
    "model.layers.2.mlp.gate_proj.weight": "model.layers.2.mlp.gate_up_proj.weight (shard 0)",
    "model.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight (all)",
    "model.embed_tokens.weight": "model.embed_tokens.weight (all)",
}
PROMPTS = [[1, 5, 9, 30], [7, 8], [99, 3, 2, 1, 40, 41]]


def build_model(directory, *, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=130,  # vLLM pads it to 192, and keeps the embedding's tensor to the end
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def worst_difference(llm, model):
    """The largest |log-probability| difference over tokens that vLLM has sampled."""
    params = vllm.SamplingParams(temperature=1.0, max_tokens=6, logprobs=0, seed=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    worst = 0.0
    for prompt, request in zip(PROMPTS, llm.generate(prompts, params, use_tqdm=False), strict=True):
        sampled = request.outputs[0]
        tokens = torch.tensor([[*prompt, *sampled.token_ids]])
        with torch.no_grad():
            logprobs = model(tokens).logits.log_softmax(-1)
        for index, (token, entry) in enumerate(
            zip(sampled.token_ids, sampled.logprobs, strict=True)
        ):
            expected = logprobs[0, len(prompt) + index - 1, token].item()
            worst = max(worst, abs(entry[token].logprob - expected))
    return worst


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)


def refit(llm, sender, version):
    thread = threading.Thread(target=sender.send, args=(version,))
    thread.start()
    reports = receive_on_workers(llm, version)
    thread.join()
    assert all(report["refit_bytes"] for report in reports)


def stage_while_sampling(llm, sender, version, **options):
    """Receive a version while requests run, and flip to it; return the outputs by request."""
    # None ends before the version has arrived, by a token that the changed weights make likely.
    params = vllm.SamplingParams(
        temperature=1.0, max_tokens=50, ignore_eos=True, logprobs=0, seed=1
    )
    llm.enqueue([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    finished = []

    def step():
        finished.extend(output for output in llm.llm_engine.step() if output.finished)

    for _ in range(3):
        step()
    stage(llm, version, place="host")
    thread = threading.Thread(target=sender.send, args=(version,))
    thread.start()
    # At least one step while it arrives; no more than leave some of the requests running.
    step()
    wait_until_staged(llm)
    thread.join()
    flip(llm, version, **options)
    sender.commit(version)
    while llm.llm_engine.has_unfinished_requests():
        step()
    return sorted(finished, key=lambda output: int(output.request_id))


def errors_by_version(outputs, models):
    """The largest |log-probability| difference of each version's tokens to its own model."""
    worst = {}
    for output in outputs:
        completion, prompt = output.outputs[0], output.prompt_token_ids
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        for span in completion.weight_versions:
            with torch.no_grad():
                logprobs = models[span.version](tokens).logits.log_softmax(-1)[0]
            for index in range(span.start, span.end):
                token = completion.token_ids[index]
                expected = logprobs[len(prompt) + index - 1, token].item()
                error = abs(completion.logprobs[index][token].logprob - expected)
                worst[span.version] = max(worst.get(span.version, 0.0), error)
    return worst


def check_staging(llm, sender, model, *, version):
    """A version that arrives while requests run is that of all later tokens, and of no earlier."""
    assert find_room(llm) == ("host", "")
    models = {str(version - 1): copy.deepcopy(model)}
    change(model)
    models[str(version)] = model
    before, after = str(version - 1), str(version)
    outputs = stage_while_sampling(llm, sender, version)
    for output in outputs:
        assert [span.version for span in output.outputs[0].weight_versions] == [before, after]
    errors = errors_by_version(outputs, models)
    assert set(errors) == {before, after}
    assert max(errors.values()) < SAME, errors
    swapped = errors_by_version(outputs, {before: models[after], after: models[before]})
    assert min(swapped.values()) > OTHER, swapped
    assert set(on_workers(llm, require_ready)) == {version}
    assert worst_difference(llm, model) < SAME


def wait_until_staged(llm):
    while not is_staged(llm):
        time.sleep(0.001)


def check_failed_staging(llm, sender, model, *, version, after):
    """A sender that breaks off leaves the version before it, without a repair."""
    source = sender._source

    class Breaking:
        def __iter__(self):
            for index, pair in enumerate(source):
                if index == after:
                    raise OSError("the trainer breaks off")
                yield pair

    kept = copy.deepcopy(model)
    change(model)
    sender._source = Breaking()
    stage(llm, version, place="host")
    with pytest.raises(OSError, match="breaks off"):
        sender.send(version)
    with pytest.raises(RefitError, match="breaks off"):
        wait_until_staged(llm)
    assert set(on_workers(llm, require_ready)) == {version - 1}
    assert worst_difference(llm, kept) < SAME
    with pytest.raises(RefitError, match="cannot be committed"):
        flip(llm, version)
    assert set(on_workers(llm, require_ready)) == {version - 1}
    sender._source = source
    stage_while_sampling(llm, sender, version)
    assert worst_difference(llm, model) < SAME


def check_abandoned_staging(llm, sender, model, *, version):
    """A version that is given up half-way has left the engine when the call returns."""
    source = sender._source
    reached, go_on = threading.Event(), threading.Event()

    class Stuck:
        def __iter__(self):
            for index, pair in enumerate(source):
                if index == 13:  # far more than the buffers hold: the first buckets are loaded
                    reached.set()
                    go_on.wait(PATIENCE_S)
                yield pair

    sender._source = Stuck()
    stage(llm, version, place="host")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, version)
        assert reached.wait(PATIENCE_S)
        assert not any(on_workers(llm, abandon_slowly))
        go_on.set()
        with pytest.raises(RefitError, match="receiver is gone"):
            sending.result(PATIENCE_S)
    assert set(on_workers(llm, require_ready)) == {version - 1}
    sender._source = source
    stage_while_sampling(llm, sender, version)
    assert worst_difference(llm, model) < SAME


def abandon_slowly(worker):
    """Abandon a load that takes a moment to be given up; return whether its thread still runs."""
    engine, give_up = worker.weight_transfer_engine, LayerwiseReload.abandon

    def slowly(reload):
        time.sleep(0.5)
        give_up(reload)

    LayerwiseReload.abandon = slowly
    try:
        engine.abandon_staging()
        return engine._staging.is_alive()
    finally:
        LayerwiseReload.abandon = give_up


def placeholders(worker):
    """Return the worker's parameters that have no memory."""
    model = worker.weight_transfer_engine.model
    return [name for name, value in model.named_parameters() if value.is_meta]


def check_failure_and_resend(llm, sender, model, *, version, after):
    """A refit that breaks off in the middle poisons the worker; a full one heals it."""
    source = sender._source

    class Breaking:
        def __iter__(self):
            for index, pair in enumerate(source):
                if index == after:
                    raise OSError("the trainer breaks off")
                yield pair

    sender._source = Breaking()
    failed = []

    def send():
        try:
            sender.send(version)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(RefitError, match="breaks off"):
        receive_on_workers(llm, version)
    thread.join()
    assert failed
    with pytest.raises(PoisonedError):
        on_workers(llm, require_ready)
    # The worker can go to sleep and wake again: there is something to copy.
    assert not any(on_workers(llm, placeholders))
    sender._source = source
    change(model)
    refit(llm, sender, version)
    sender.commit(version)
    assert set(on_workers(llm, require_ready)) == {version}
    assert worst_difference(llm, model) < SAME


def check_omissions(llm, model, transport, *, ranks):
    """A plan that leaves out a tensor is reported on both sides, and changes no version."""
    for number, (name, expected) in enumerate(OMISSIONS.items(), 1):
        kept = [(key, value) for key, value in model.named_parameters() if key != name]
        assert len(kept) == len(list(model.named_parameters())) - 1
        with RefitSender(TensorSource(kept), transport, ranks, timeout_s=PATIENCE_S) as sender:
            llm.init_weight_transfer_engine(init_info(sender.address))
            failed = []

            def send(sender=sender, failed=failed, number=number):
                try:
                    sender.send(number)
                except RefitError as error:
                    failed.append(str(error))

            thread = threading.Thread(target=send)
            thread.start()
            with pytest.raises(RefitError, match=re.escape(expected)):
                receive_on_workers(llm, number)
            thread.join()
            assert expected in failed[0], failed
            with pytest.raises(PoisonedError):
                on_workers(llm, require_ready)
    with RefitSender(TensorSource(model.named_parameters()), transport, ranks) as sender:
        llm.init_weight_transfer_engine(init_info(sender.address))
        refit(llm, sender, 1)
        sender.commit(1)
        assert worst_difference(llm, model) < SAME


def start_engine(directory, ranks, **options):
    """Start vLLM on a model's directory, over some ranks of tensor parallelism."""
    return vllm.LLM(
        directory,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        tensor_parallel_size=ranks,
        distributed_executor_backend="uni" if ranks == 1 else "mp",
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": "rl_refit"},
        **options,
    )


def check_transport(llm, model, transport, *, ranks):
    """Hold every way of a refit, and of its failure, over a transport."""
    assert worst_difference(llm, model) < SAME
    source = TensorSource(model.named_parameters())
    # A bucket holds one layer and not two, so that the buffers are filled again and again.
    with RefitSender(
        source, transport, ranks, bucket_bytes=700_000, timeout_s=PATIENCE_S
    ) as sender:
        print(sender.plan)
        llm.init_weight_transfer_engine(init_info(sender.address))
        for version in range(1, 4):
            change(model)
            before = worst_difference(llm, model)
            assert before > OTHER, before
            refit(llm, sender, version)
            sender.commit(version)
            assert on_workers(llm, require_ready) == [version] * ranks
            after = worst_difference(llm, model)
            print(version, before, after)
            assert after < SAME, after
        # Nothing changes any more, and nothing drifts.
        for version in range(4, 24 if ranks == 1 else 6):
            refit(llm, sender, version)
            sender.commit(version)
        assert worst_difference(llm, model) == after
    with (
        RefitSender(source, transport, ranks, verify="weights") as sender,
        pytest.raises(ValueError, match=r'verify="weights".*qkv_proj'),
    ):
        on_workers(llm, "init_weight_transfer_engine", init_info(sender.address)["init_info"])
    # Buckets that split layers and tensors: a failure leaves pieces of them in the loader.
    with RefitSender(source, transport, ranks, bucket_bytes=50_000, timeout_s=PATIENCE_S) as sender:
        llm.init_weight_transfer_engine(init_info(sender.address))
        for version, after in enumerate((2, 5, 13, 24), 1):
            check_failure_and_resend(llm, sender, model, version=version, after=after)
    check_omissions(llm, model, transport, ranks=ranks)
    with RefitSender(source, transport, ranks, bucket_bytes=50_000, timeout_s=PATIENCE_S) as sender:
        llm.init_weight_transfer_engine(init_info(sender.address))
        refit(llm, sender, 1)  # vLLM remembers the loaders of a reload in place
        sender.commit(1)
        for version in (2, 3):
            check_staging(llm, sender, model, version=version)
        # The other way in between: both keep their state apart.
        change(model)
        refit(llm, sender, 4)
        sender.commit(4)
        assert worst_difference(llm, model) < SAME
        for version, after in enumerate((2, 13, 24), 5):
            check_failed_staging(llm, sender, model, version=version, after=after)
        check_abandoned_staging(llm, sender, model, version=8)
        on_workers(llm, release_staging)
        check_staging(llm, sender, model, version=9)


def main():
    transports, ties, tensor_parallel_size, directory = sys.argv[1:]
    ranks = int(tensor_parallel_size)
    model = build_model(directory, tied=ties == "tied")
    llm = start_engine(directory, ranks)
    for transport in transports.split(","):
        check_transport(llm, model, transport, ranks=ranks)
    print("all refits are as they should be")


if __name__ == "__main__":
    main()
