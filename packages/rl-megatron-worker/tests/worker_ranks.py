"""What the tests of the whole worker run on each rank; every function returns named results."""

import gc
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from batches import LOSSES
from megatron.core import parallel_state
from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.host_memory import OffloadBuffers
from rl_megatron_worker import MegatronPolicyWorker
from rl_megatron_worker.model import heads
from rl_megatron_worker.model.build import unwrapped
from rl_megatron_worker.model.experts import expert_layers
from rl_megatron_worker.runtime import place_parameters
from tiny_models import build_tokenizer

BUDGET = 24


@contextmanager
def worker_for(config, **options):
    worker = MegatronPolicyWorker(config, build_tokenizer(), **options)
    try:
        yield worker
    finally:
        worker.shutdown()


def place():
    return parallel_state.get_data_parallel_rank()


def rows_of(batch, section=None, *, global_batch_size=None):
    """Return the rows of this rank's data-parallel place with `section`'s plan, and their order."""
    num_ranks = parallel_state.get_data_parallel_world_size()
    arguments = {}
    if section is not None:
        arguments[f"{section}_args"] = {"max_tokens_per_microbatch": BUDGET}
    shards = BatchedDataDict(batch).shard_by_batch_size(
        num_ranks, batch_size=global_batch_size, allow_uneven_shards=True, **arguments
    )
    shards, order = shards if section is not None else (shards, None)
    return shards[place()], order


def sent_by(worker):
    return {name: tensor.clone() for name, tensor in worker.weight_source}


def run_case(*, config, batch, section, num_calls, loss="nll"):
    """Return the results of scoring, sending and training, and this rank's data-parallel rank."""
    with worker_for(config) as worker:
        rows, order = rows_of(batch, section)
        logprobs = worker.get_logprobs(rows)["logprobs"]
        sent = sent_by(worker)
        size = config["train_global_batch_size"]
        rows, _ = rows_of(batch, section, global_batch_size=size)
        results = [worker.train(rows, LOSSES[loss]()) for _ in range(num_calls)]
        reference = worker.get_reference_policy_logprobs(rows_of(batch, section)[0])
        return {
            "place": place(),
            "order": order,
            "logprobs": logprobs,
            "reference": reference["reference_logprobs"],
            "sent": sent,
            "losses": torch.cat([result["global_loss"] for result in results]),
            "grad_norms": torch.cat([result["grad_norm"] for result in results]),
            "parameters": sent_by(worker),
            "metrics": results[-1]["all_mb_metrics"],
        }


def generate_and_score(*, config, batch, greedy):
    """Return this rank's place, its completions, and the log-probabilities they are given."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, order = rows_of(batch)
        output = worker.generate(rows, greedy=greedy)
        scored = worker.get_logprobs(
            BatchedDataDict(
                {
                    "input_ids": output["output_ids"],
                    "input_lengths": output["unpadded_sequence_lengths"],
                }
            )
        )
        return {"place": place(), "order": order, "scored": scored["logprobs"], **output}


def train_and_look(*, config, batch, loss, eval_mode=False, num_calls=1):
    """Return the results of `train`, and the weights before and after."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, global_batch_size=config["train_global_batch_size"])
        before = sent_by(worker)
        results = [
            worker.train(rows, LOSSES[loss](), eval_mode=eval_mode) for _ in range(num_calls)
        ]
        return {
            "place": place(),
            "results": results,
            "before": before,
            "after": sent_by(worker),
            "logprobs": worker.get_logprobs(rows_of(batch)[0])["logprobs"],
        }


def train_compiled(*, compiles, **arguments):
    """Return what `train_and_look` does with functions compiled, or as written, and how many were.

    The rank goes on to other tests, where the setting is as before.
    """
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    with torch._dynamo.config.patch(disable=not compiles):
        results = train_and_look(**arguments)
    return results, frames["ok"] - before


def train_without_gathering(*, config, batch, loss):
    """`train_and_look` on ranks that do not gather logits over the vocabulary."""

    def refuse(*_):
        raise AssertionError("logits were gathered")

    heads.gather_from_tensor_model_parallel_region = refuse
    return train_and_look(config=config, batch=batch, loss=loss)


def topk(*, config, batch, k):
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows, order = rows_of(batch)
        return {"place": place(), "order": order, **worker.get_topk_logits(rows, k)}


def train_between_moves(*, config, batch, moves):
    """Return the losses of two `train` calls, and what is refused in the states between them."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, global_batch_size=config["train_global_batch_size"])
        losses = [worker.train(rows, LOSSES["nll"]())["global_loss"]]
        refused = _go_through_states(worker, rows) if moves else {}
        losses.append(worker.train(rows, LOSSES["nll"]())["global_loss"])
        return {"losses": torch.cat(losses), "refused": refused}


def _go_through_states(worker, rows):
    refused = {}
    before = sent_by(worker)
    worker.offload_before_refit()
    refused["refitting"] = _refusal(lambda: worker.train(rows, LOSSES["nll"]()))
    assert all(torch.equal(before[name], each) for name, each in sent_by(worker).items())
    worker.offload_after_refit()
    refused["offloaded"] = _refusal(lambda: worker.get_logprobs(rows))
    worker.prepare_for_lp_inference()
    refused["inference"] = _refusal(lambda: worker.train(rows, LOSSES["nll"]()))
    worker.train(rows, LOSSES["nll"](), eval_mode=True)
    worker.prepare_for_training()
    return refused


def _refusal(call):
    from rl_interfaces import ResidencyError

    try:
        call()
    except ResidencyError as error:
        return str(error)
    return None


def information(*, config):
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        worker.start_gpu_profiling()
        worker.stop_gpu_profiling()
        return {
            "gpu_info": worker.get_gpu_info(),
            "device_id": worker.report_device_id(),
            "is_alive": worker.is_alive(),
            "name": repr(worker),
        }


def embeddings_with_noise(*, config):
    """Return the embedding, or the output matrix, of this stage: before and after the noise."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        weight = unwrapped(worker.model[0]).shared_embedding_or_output_weight()
        before = weight.detach().clone()
        worker._add_noise_to_weights()
        return {"before": before, "after": weight.detach().clone()}


def devices_in_each_state(*, config, batch):
    """Return where parameters and optimizer state are in each state, and what is allocated."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, global_batch_size=config["train_global_batch_size"])
        worker.train(rows, LOSSES["nll"]())
        states = {"training": _devices(worker)}
        for state, call in (
            ("inference", worker.prepare_for_lp_inference),
            ("refitting", worker.offload_before_refit),
            ("offloaded", worker.offload_after_refit),
        ):
            call()
            states[state] = _devices(worker)
        return states


def _devices(worker):
    parameters = {each.device.type for chunk in worker.model for each in chunk.parameters()}
    state = worker._engine.optimizer.optimizer.state
    optimizer = {
        value.device.type
        for _, values in state.items()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    return {"parameters": parameters, "optimizer": optimizer, "bytes": _allocated_bytes()}


def _allocated_bytes():
    if not torch.cuda.is_available():
        return 0
    # The workspaces of cuBLAS are in the count, and larger than a tiny model.
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def train_and_save(*, config, batch, directory):
    """Train twice, save, train once more; return the weights after both, and what is drawn."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, global_batch_size=config["train_global_batch_size"])
        for _ in range(2):
            worker.train(rows, LOSSES["nll"]())
        saved = sent_by(worker)
        worker.offload_after_refit()
        worker.save_checkpoint(
            f"{directory}/weights", f"{directory}/optimizer", f"{directory}/tokenizer"
        )
        worker.save_hf_checkpoint(f"{directory}/exported", max_file_bytes=20_000)
        drawn = torch.rand(4, generator=worker._random.sampling)
        refused = _refusal(lambda: worker.get_logprobs(rows))
        worker.prepare_for_training()
        worker.train(rows, LOSSES["nll"]())
        return {"refused": refused, "saved": saved, "after": sent_by(worker), "drawn": drawn}


def load_and_train(*, config, batch, directory):
    """Load, train once; return the weights as loaded, and after."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, init_reference_model=False, **paths) as worker:
        loaded = sent_by(worker)
        drawn = torch.rand(4, generator=worker._random.sampling)
        rows, _ = rows_of(batch, global_batch_size=config["train_global_batch_size"])
        worker.train(rows, LOSSES["nll"]())
        return {"loaded": loaded, "after": sent_by(worker), "drawn": drawn}


def place_as_on_cuda(*, config):
    """Move parameters off the device and back, as CUDA has it done; return what that changes."""
    with worker_for(config, init_reference_model=False) as worker:
        before, scope = sent_by(worker), worker._engine.runtime.scope
        cuda = SimpleNamespace(on_cuda=True, device=torch.device("cpu"), scope=scope)
        buffers = OffloadBuffers()
        for on_device in (False, True):
            place_parameters(worker.model, cuda, on_device=on_device, host_buffers=buffers)
        return all(torch.equal(before[name], each) for name, each in sent_by(worker).items())


class _LossWithoutRows:
    """Has no valid sample at one data-parallel place, and a metric of numpy's at the others."""

    def __init__(self, place_without):
        self._loss, self._place = LOSSES["nll"](), place_without
        self.loss_type, self.input_type = self._loss.loss_type, self._loss.input_type

    def __call__(self, *arguments):
        if place() == self._place:
            return torch.zeros(()), {"num_valid_samples": 0}
        value, metrics = self._loss(*arguments)
        return value, metrics | {"half": np.float32(0.5)}


def train_without_rows(*, config, batch):
    """Return the metrics of steps in which one place has nothing to train on."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, global_batch_size=config["train_global_batch_size"])
        worker.train(rows, LOSSES["nll"]())
        results = [worker.train(rows, _LossWithoutRows(0)) for _ in range(2)]
        return {
            "place": place(),
            "metrics": [result["all_mb_metrics"].get("half", []) for result in results],
            "weights": sent_by(worker),
        }


class _LossWithTextMetric:
    def __init__(self):
        self._loss = LOSSES["nll"]()
        self.loss_type, self.input_type = self._loss.loss_type, self._loss.input_type

    def __call__(self, *arguments):
        value, metrics = self._loss(*arguments)
        return value, metrics | {"device": torch.device("cpu")}


def train_with_text_metric(*, config, batch):
    """Return the error of `train` with a metric that is not a number."""
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, global_batch_size=config["train_global_batch_size"])
        try:
            worker.train(rows, _LossWithTextMetric())
        except (TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def fail_to_start(*, config):
    """Return why a worker did not start, and whether it left anything behind."""
    try:
        MegatronPolicyWorker(config, build_tokenizer(), weights_path="nowhere")
    except ValueError as error:
        message = str(error)
    else:
        message = "it started"
    return {
        "error": message,
        "has_default_group": torch.distributed.is_initialized(),
        "has_model_parallel_groups": parallel_state.is_initialized(),
    }


class _FailingLoss:
    """Raises at the second micro-batch of one data-parallel place."""

    def __init__(self, place_that_fails):
        self._loss = LOSSES["nll"]()
        self.loss_type, self.input_type = self._loss.loss_type, self._loss.input_type
        self._place, self._num_calls = place_that_fails, 0

    def __call__(self, *arguments):
        self._num_calls += 1
        if place() == self._place and self._num_calls == 2:
            raise LookupError("no such advantage")
        return self._loss(*arguments)


class _CollectingLoss:
    """Has Python collect garbage, such as that of a failed call, at every micro-batch.

    Then it waits, so that a reduction that had begun too early would have read the gradients.
    """

    def __init__(self):
        self._loss = LOSSES["nll"]()
        self.loss_type, self.input_type = self._loss.loss_type, self._loss.input_type

    def __call__(self, *arguments):
        gc.collect()
        time.sleep(0.1)
        return self._loss(*arguments)


def train_after_a_failure(*, config, batch, place_that_fails):
    """Return the errors of `train` with a loss that raises, and the step after them."""
    gc.disable()  # until the step: what failed calls leave behind is collected in its middle
    with worker_for(config, init_reference_model=False) as worker:
        rows, _ = rows_of(batch, global_batch_size=config["train_global_batch_size"])
        errors = []
        for eval_mode in (False, True):
            try:
                worker.train(rows, _FailingLoss(place_that_fails), eval_mode=eval_mode)
            except (LookupError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        result = worker.train(rows, _CollectingLoss())
        return {"errors": errors, "losses": result["global_loss"], "weights": sent_by(worker)}


def replay_routes(*, config, batch, section, routes=None):
    """Return the routes that scoring records, and what scoring and training give with `routes`."""
    with worker_for(config) as worker:
        rows, order = rows_of(batch, section)
        recorded = worker.get_logprobs(rows)
        given = batch if routes is None else BatchedDataDict({**batch, "routed_experts": routes})
        rows, _ = rows_of(given, section)
        replayed = worker.get_logprobs(rows)
        reference = worker.get_reference_policy_logprobs(rows)
        size = config["train_global_batch_size"]
        rows, _ = rows_of(given, section, global_batch_size=size)
        results = [worker.train(rows, LOSSES["nll"]()) for _ in range(2)]
        return {
            "place": place(),
            "order": order,
            "routed_experts": recorded["routed_experts"],
            "logprobs": replayed["logprobs"],
            "reference": reference["reference_logprobs"],
            "given_back": "routed_experts" in replayed,
            "losses": torch.cat([result["global_loss"] for result in results]),
            "parameters": sent_by(worker),
        }


def score_with_routes(*, config, batch):
    """Return the log-probabilities of a batch, and its routes if it has none yet."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return {"place": place(), "order": None, **worker.get_logprobs(rows_of(batch)[0])}


def router_dtypes(*, config, batch):
    """Return the dtypes of the weights that routers give to experts, in scoring and training."""
    found = set()
    with worker_for(config) as worker:
        for chunk in worker.model:
            for layer in expert_layers(chunk):
                layer.router.register_forward_hook(
                    lambda module, arguments, output: found.add(output[0].dtype)
                )
        rows, _ = rows_of(batch)
        worker.get_logprobs(rows)
        worker.train(rows, LOSSES["nll"]())
    return found


def environment_of(*, config, name):
    """Return a variable of this process's environment: before, with and after a worker."""
    found = [os.environ.get(name)]
    with worker_for(config):
        found.append(os.environ.get(name))
    return [*found, os.environ.get(name)]
