"""Refit adapters into a real vLLM engine; compare with merged weights; run by `test_vllm.py`.

Usage: python vllm_adapters.py TRANSPORT tied|untied TENSOR_PARALLEL_SIZE DIRECTORY
"""

# ruff: noqa: T201

import copy
import sys
import threading

import pytest
import torch
import vllm
import vllm_refits
from patience import PATIENCE_S
from rl_refit import PoisonedError, RefitError, RefitSender, TensorSource
from rl_refit.adapters import DOWN, UP
from rl_refit.vllm import (
    ADAPTER_ID,
    find_room,
    flip,
    holds_base,
    init_info,
    on_workers,
    require_ready,
    stage,
    start_adapters,
)
from rl_refit.vllm import refit as receive_on_workers
from tolerances import ENGINE
from vllm.lora.request import LoRARequest
from vllm_refits import (
    OTHER,
    PROMPTS,
    build_model,
    change,
    errors_by_version,
    start_engine,
    wait_until_staged,
)

SAME = ENGINE
RANK, SCALE = 8, 5 / 3
REQUEST = LoRARequest("policy", ADAPTER_ID, "refit")


class Adapters:
    """Adapters of some layers of a model, drawn anew for each version."""

    def __init__(self, model, ends):
        weights = dict(model.named_parameters())
        self.model = model
        self.layers = [
            name.removesuffix(".weight")
            for name in weights
            if name.removesuffix(".weight").endswith(ends)
        ]
        self.factors = {}
        for layer in self.layers:
            outputs, inputs = weights[layer + ".weight"].shape
            self.factors[layer + DOWN] = torch.zeros(RANK, inputs)
            self.factors[layer + UP] = torch.zeros(outputs, RANK)

    def draw(self):
        for tensor in self.factors.values():
            tensor.normal_(std=0.2)

    def merged(self):
        """Return a copy of the model with weights `W + scale * B @ A`, in float64 until the end."""
        model = copy.deepcopy(self.model)
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for layer in self.layers:
                down, up = self.factors[layer + DOWN], self.factors[layer + UP]
                weights[layer + ".weight"] += (up.double() @ down.double() * SCALE).float()
        return model

    def source(self):
        """Return the factors as they are sent, B with its scale."""
        return _Scaled(self.factors)


class _Scaled:
    def __init__(self, factors):
        self.factors = factors

    def metadata(self):
        return TensorSource(self.factors).metadata()

    def __iter__(self):
        for name, tensor in self.factors.items():
            yield name, tensor * SCALE if name.endswith(UP) else tensor


class WithAdapter:
    """An LLM whose requests name the adapter."""

    def __init__(self, llm):
        self._llm = llm

    def generate(self, *args, **kwargs):
        return self._llm.generate(*args, lora_request=REQUEST, **kwargs)


def worst_difference(llm, model):
    return vllm_refits.worst_difference(WithAdapter(llm), model)


def refit(llm, sender, version, *, adapters_only):
    reports = []

    def send():
        reports.append(sender.send(version, adapters_only=adapters_only))

    thread = threading.Thread(target=send)
    thread.start()
    receive_on_workers(llm, version)
    thread.join()
    sender.commit(version)
    return reports[0]


def stage_while_sampling(llm, sender, version, *, kv_cache="drop"):
    """Receive adapters while requests run, and flip to them; return the outputs by request."""
    params = vllm.SamplingParams(temperature=1.0, max_tokens=40, logprobs=0, seed=1)
    prompts = [{"prompt_token_ids": prompt, "cache_salt": str(version)} for prompt in PROMPTS]
    llm.enqueue(prompts, params, lora_request=REQUEST, use_tqdm=False)
    finished = []

    def step():
        finished.extend(output for output in llm.llm_engine.step() if output.finished)

    for _ in range(3):
        step()
    stage(llm, version, place="host")
    thread = threading.Thread(target=sender.send, args=(version,), kwargs={"adapters_only": True})
    thread.start()
    step()
    wait_until_staged(llm)
    thread.join()
    flip(llm, version, kv_cache=kv_cache)
    sender.commit(version)
    while llm.llm_engine.has_unfinished_requests():
        step()
    return sorted(finished, key=lambda output: int(output.request_id))


def check_staging(llm, sender, adapters, *, version):
    """Tokens of running requests are of the old adapters up to the flip, of the new ones after."""
    before, after = str(version - 1), str(version)
    models = {before: adapters.merged()}
    adapters.draw()
    models[after] = adapters.merged()
    outputs = stage_while_sampling(llm, sender, version)
    for output in outputs:
        assert [span.version for span in output.outputs[0].weight_versions] == [before, after]
    errors = errors_by_version(outputs, models)
    assert max(errors.values()) < SAME, errors
    swapped = errors_by_version(outputs, {before: models[after], after: models[before]})
    assert min(swapped.values()) > OTHER, swapped
    assert set(on_workers(llm, require_ready)) == {version}


def check_failed_staging(llm, sender, adapters, *, version):
    """Adapters that break off leave those before them serving."""
    source, kept = sender._adapters, adapters.merged()

    class Breaking:
        def __iter__(self):
            for index, pair in enumerate(source):
                if index == 5:
                    raise OSError("the trainer breaks off")
                yield pair

    adapters.draw()
    sender._adapters = Breaking()
    stage(llm, version, place="host")
    with pytest.raises(OSError, match="breaks off"):
        sender.send(version, adapters_only=True)
    with pytest.raises(RefitError, match="breaks off"):
        wait_until_staged(llm)
    sender._adapters = source
    assert set(on_workers(llm, require_ready)) == {version - 1}
    assert worst_difference(llm, kept) < SAME
    # The base is still that of the sender.
    stage_while_sampling(llm, sender, version)
    assert worst_difference(llm, adapters.merged()) < SAME


def check_refusals(llm, model, transport, ranks):
    """What vLLM cannot take is named, on both sides."""
    odd = Adapters(model, ("embed_tokens",))
    wide = Adapters(model, ("o_proj",))
    wide.factors = {
        name: torch.zeros([64 if size == RANK else size for size in tensor.shape])
        for name, tensor in wide.factors.items()
    }
    for adapters, expected in ((odd, "vLLM takes no adapters of 1 layers"), (wide, "rank 64, and")):
        with RefitSender(
            TensorSource(model.named_parameters()),
            transport,
            ranks,
            adapters=adapters.source(),
            timeout_s=PATIENCE_S,
        ) as sender:
            llm.init_weight_transfer_engine(init_info(sender.address))
            failed = []

            def send(sender=sender, failed=failed):
                try:
                    sender.send(1)
                except RefitError as error:
                    failed.append(str(error))

            thread = threading.Thread(target=send)
            thread.start()
            with pytest.raises(RefitError, match=expected):
                receive_on_workers(llm, 1)
            thread.join()
            assert expected in failed[0], failed
            with pytest.raises(PoisonedError):
                on_workers(llm, require_ready)
            assert not any(on_workers(llm, holds_base))


def main():
    transport, ties, tensor_parallel_size, directory = sys.argv[1:]
    ranks = int(tensor_parallel_size)
    model = build_model(directory, tied=ties == "tied")
    llm = start_engine(
        directory, ranks, enable_chunked_prefill=False, enable_lora=True, max_lora_rank=RANK
    )
    on_workers(llm, start_adapters)
    assert worst_difference(llm, model) < SAME
    # Base weights that are not those of the files.
    change(model)
    # Of fused layers a part: vLLM's qkv_proj gets q and v alone.
    ends = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapters = Adapters(model, ends)
    base = TensorSource(model.named_parameters())
    with RefitSender(
        base,
        transport,
        ranks,
        adapters=adapters.source(),
        bucket_bytes=200_000,
        timeout_s=PATIENCE_S,
    ) as sender:
        llm.init_weight_transfer_engine(init_info(sender.address))
        assert not any(on_workers(llm, holds_base))
        assert find_room(llm) == (None, "the engine serves adapters")
        adapters.draw()
        full = refit(llm, sender, 1, adapters_only=False)
        assert full.bytes_sent >= full.bytes
        worst = worst_difference(llm, adapters.merged())
        print("full refit", worst)
        assert worst < SAME, worst
        assert worst_difference(llm, model) > OTHER
        assert all(on_workers(llm, holds_base))
        assert find_room(llm) == ("host", "")
        for version in (2, 3):
            adapters.draw()
            alone = refit(llm, sender, version, adapters_only=True)
            worst = worst_difference(llm, adapters.merged())
            print(f"adapters alone, {alone.bytes_sent} of {alone.bytes} bytes:", worst)
            assert worst < SAME, worst
            own = sum(tensor.nbytes for tensor in adapters.factors.values())
            assert own <= alone.bytes_sent < own + 256 * len(adapters.factors)
        for version in (4, 5):
            check_staging(llm, sender, adapters, version=version)
        check_failed_staging(llm, sender, adapters, version=6)
        # Between the staged ones: in place, and the base once more.
        adapters.draw()
        refit(llm, sender, 7, adapters_only=True)
        assert worst_difference(llm, adapters.merged()) < SAME
        adapters.draw()
        refit(llm, sender, 8, adapters_only=False)
        assert worst_difference(llm, adapters.merged()) < SAME
        check_staging(llm, sender, adapters, version=9)
        # Merged by hand into the same engine: the plain way, bit by bit the same requests.
        merged = adapters.merged()
    with RefitSender(TensorSource(merged.named_parameters()), transport, ranks) as sender:
        llm.init_weight_transfer_engine(init_info(sender.address))
        refit(llm, sender, 1, adapters_only=False)
        assert worst_difference(llm, merged) < SAME
    check_refusals(llm, model, transport, ranks)
    print("all refits are as they should be")


if __name__ == "__main__":
    main()
