"""Cases of several sets of adapters that ranks run."""

from pathlib import Path

import torch
from loading_ranks import process_group
from ranks import worker_for
from rl_dtensor_worker.model.lora import trained_parameters
from rl_dtensor_worker.parallel.fsdp import full_tensor
from rl_interfaces import LossInput, LossType
from split_ranks import rows_of

# An eps that does not amplify the rounding of small gradients.
ADAM = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
BOTH = ["attention", "mlp"]
SAMPLING = {
    "max_new_tokens": 6,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_token_ids": [],
    "stop_strings": [],
    "stops_at_end": True,
    "seed": 11,
}


class SummedNll:
    """Minus the log-probabilities of all tokens, per row; the rows' own come back."""

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInput.LOGPROBS
    returns_rows = True

    def __call__(self, logprobs, data, global_valid_seqs, global_valid_toks):
        cost = -(logprobs * data["token_mask"] * data["sample_mask"][:, None]).sum()
        return cost / global_valid_seqs, {"num_valid_samples": 1}, {"logprobs": logprobs}


def adapters_in(worker):
    return {name: full_tensor(p).clone() for name, p in trained_parameters(worker.model).items()}


def train(worker, name, batches, *, step=True):
    worker.use_adapters(name)
    found = [worker.forward_backward(rows_of(worker, each, None), SummedNll()) for each in batches]
    if step:
        worker.adam_step(ADAM)
    return found


def alone(*, config, specs, batches):
    """Return the adapters of each set after training in a worker that has no other."""
    found = {}
    with process_group():
        for name, spec in specs.items():
            with worker_for(config, init_reference_model=False) as worker:
                worker.add_adapters(name, **spec)
                for step in batches[name]:
                    train(worker, name, step)
                found[name] = adapters_in(worker)
    return found


def interleaved(*, config, specs, batches):
    """Return the same with all sets in one worker, whose calls alternate."""
    with process_group(), worker_for(config, init_reference_model=False) as worker:
        for name, spec in specs.items():
            worker.add_adapters(name, **spec)
        num_steps = len(next(iter(batches.values())))
        for step in range(num_steps):
            num_calls = len(batches["a"][step])
            for call in range(num_calls):
                for name in specs:
                    train(worker, name, batches[name][step][call : call + 1], step=False)
            for name in specs:
                worker.use_adapters(name)
                worker.adam_step(ADAM)
        found = {}
        for name in specs:
            worker.use_adapters(name)
            found[name] = adapters_in(worker)
        return found


def gradients_and_step(*, config, spec, batches):
    """Return what is needed to take the first step by hand, the step, and the rows of the calls."""
    with process_group(), worker_for(config, init_reference_model=False) as worker:
        worker.add_adapters("a", **spec)
        worker.use_adapters("a")
        before = adapters_in(worker)
        found = train(worker, "a", batches, step=False)
        report = worker.adam_step(ADAM)
        rows = [each["rows"]["logprobs"] for each in found]
        return before, adapters_in(worker), report, rows


def saved_and_loaded(*, config, spec, batches, directory):
    """Return the adapters after a step more: as it is, saved and loaded, and a copy's sample."""
    with process_group(), worker_for(config, init_reference_model=False) as worker:
        worker.add_adapters("a", **spec)
        train(worker, "a", batches)
        path = str(Path(directory) / "a")
        worker.save_adapter_set(path, with_optimizer=True)
        worker.copy_adapters("sampler")
        kept = adapters_in(worker)
        train(worker, "a", batches)
        continued = adapters_in(worker)
        worker.load_adapter_set("b", path, with_optimizer=True)
        worker.use_adapters("b")
        loaded = adapters_in(worker)
        train(worker, "b", batches)
        resumed = adapters_in(worker)
        worker.use_adapters("sampler")
        copied = adapters_in(worker)
        prompts = rows_of(worker, batches[0], None)
        one, two = worker.sample(prompts, SAMPLING), worker.sample(prompts, SAMPLING)
        worker.remove_adapters("a")
        worker.use_adapters(None)
        base = worker.get_logprobs(prompts)["logprobs"]
        same = torch.equal(one["output_ids"], two["output_ids"])
        return kept, copied, loaded, continued, resumed, same, base
