"""What the tests let every rank do; each builds its own worker and leaves the group again."""

import gc
import logging
import os
from contextlib import contextmanager
from pathlib import Path

import torch
from losses_for_tests import make_loss
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.parallel.fsdp import full_tensor, local_tensor
from tiny_model import build_tokenizer, make_batch, make_config, rows_for_rank
from torch.distributed.tensor import DTensor


def this_rank():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def worker_for(config, **options):
    worker = DTensorPolicyWorker(config, build_tokenizer(), **options)
    try:
        yield worker
    finally:
        worker.shutdown()


def parameters_of(worker):
    """Return every parameter, whole, on the CPU. Collective."""
    return {name: full_tensor(p).cpu().clone() for name, p in worker.model.named_parameters()}


def shards_of(worker):
    """Return this rank's shard of every parameter, copied."""
    return {n: local_tensor(p).cpu().clone() for n, p in worker.model.named_parameters()}


def my_rows(batch, global_batch_size=None):
    rank, num_ranks = this_rank()
    size = global_batch_size or batch["input_ids"].shape[0]
    return rows_for_rank(batch, rank=rank, num_ranks=num_ranks, global_batch_size=size)


def score(*, config, batch, micro_batch_size=None):
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return worker.get_logprobs(my_rows(batch), micro_batch_size)["logprobs"]


def train(*, config, batch, num_calls=1, loss="nll", gbs=None, mbs=None):
    """Return parameters, losses, norms and metrics after `num_calls` of `train`."""
    with worker_for(config, init_reference_model=False) as worker:
        size = gbs or config["train_global_batch_size"]
        rows = my_rows(batch, size)
        results = [worker.train(rows, make_loss(loss), gbs=gbs, mbs=mbs) for _ in range(num_calls)]
        return parameters_of(worker), results


def warnings_of_skipped_steps(*, config, batch):
    """Return what the optimizer warns of while the steps of a call are not finite."""
    texts = []

    class Kept(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("rl_dtensor_worker.optim"), Kept(logging.WARNING)
    logger.addHandler(handler)
    try:
        train(config=config, batch=batch, loss="nonfinite")
    finally:
        logger.removeHandler(handler)
    return texts


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("planted")


def train_after_a_failure(*, config, batch, fails, failing_batch):
    """Return parameters and results of a `train` after a call whose `fails` has raised."""

    def fail(*_):
        raise MemoryError("planted")

    with worker_for(config, init_reference_model=False) as worker:
        layer, loss, rows = worker.model.model.layers[0], make_loss("nll"), my_rows(failing_batch)
        if fails == "loss":
            loss = make_loss("failing")
        elif fails == "backward":
            hook = layer.register_forward_hook(lambda *each: _Failing.apply(each[-1]))
        else:
            hook = layer.self_attn.register_forward_pre_hook(fail)
        try:
            worker.train(rows, loss, eval_mode=fails == "evaluation")
        except MemoryError:
            pass
        else:
            raise AssertionError(f"the {fails} did not fail")
        if fails != "loss":
            hook.remove()
        result = worker.train(my_rows(batch), make_loss("nll"))
        return parameters_of(worker), result


def eval_leaves_no_trace(*, config, batch):
    """Return whether shards and random state are as before, and the losses of both calls."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        before, random_before = shards_of(worker), torch.get_rng_state()
        training_before = worker.model.training
        result = worker.train(my_rows(batch, 4), make_loss("drawing"), eval_mode=True)
        after = shards_of(worker)
        return {
            "same_shards": all(torch.equal(before[n], after[n]) for n in before),
            "same_random": torch.equal(random_before, torch.get_rng_state()),
            "same_mode": worker.model.training == training_before,
            "result": result,
        }


def reference_stays(*, config, batch):
    """Return policy and reference log-probabilities before and after training."""
    with worker_for(config) as worker:
        rows = my_rows(batch, 4)
        reference = [worker.get_reference_policy_logprobs(rows)["reference_logprobs"]]
        policy = [worker.get_logprobs(rows)["logprobs"]]
        for _ in range(2):
            worker.train(rows, make_loss("nll"))
            shards = shards_of(worker)
            reference.append(worker.get_reference_policy_logprobs(rows)["reference_logprobs"])
            restored = shards_of(worker)
            assert all(torch.equal(shards[n], restored[n]) for n in shards)
            policy.append(worker.get_logprobs(rows)["logprobs"])
        return policy, reference


def reference_context_restores_after_an_error(*, config):
    with worker_for(config) as worker:
        worker._add_noise_to_weights()
        before = shards_of(worker)
        inside = None
        try:
            with worker.use_reference_model():
                inside = shards_of(worker)
                raise KeyError("planted")
        except KeyError:
            pass
        after = shards_of(worker)
        return (
            any(not torch.equal(before[n], inside[n]) for n in before),
            all(torch.equal(before[n], after[n]) for n in before),
        )


def offload_and_reload(*, config, batch, offload):
    """Return the parameters after train, (offload and reload,) train."""
    with worker_for(config, init_reference_model=False) as worker:
        rows = my_rows(batch, 4)
        worker.train(rows, make_loss("nll"))
        if offload:
            worker.offload_before_refit()
            worker.offload_after_refit()
            worker.prepare_for_lp_inference()
            worker.get_logprobs(rows)
            worker.prepare_for_training()
        worker.train(rows, make_loss("nll"))
        return shards_of(worker)


def calls_in_wrong_states(*, config, batch):
    """Return the error text of each call that its state does not allow."""
    errors = []
    with worker_for(config) as worker:
        rows = my_rows(batch, 4)

        def attempt(call):
            try:
                call()
            except RuntimeError as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                errors.append("allowed")

        worker.prepare_for_lp_inference()
        attempt(lambda: worker.train(rows, make_loss("nll")))
        attempt(lambda: worker.train(rows, make_loss("nll"), eval_mode=True))
        worker.offload_after_refit()
        attempt(lambda: worker.get_logprobs(rows))
        attempt(lambda: worker.generate(rows))
        worker.prepare_for_training()
        attempt(lambda: worker.train(rows, make_loss("nll")))
    return errors


def train_save_train(*, config, batch, directory):
    """Train once, save, train twice more; return what the last call gave."""
    with worker_for(config, init_reference_model=False) as worker:
        rows = my_rows(batch, 4)
        worker.train(rows, make_loss("nll"))
        worker.generate(rows)  # the random state that is saved is not a new worker's
        worker.save_checkpoint(
            f"{directory}/weights", f"{directory}/optimizer", f"{directory}/tokenizer"
        )
        worker.save_hf_checkpoint(f"{directory}/hf")
        sampled = worker.generate(rows)["output_ids"]
        worker.train(rows, make_loss("nll"))
        result = worker.train(rows, make_loss("nll"))
        return result, shards_of(worker), sampled, parameters_of(worker)


def load_and_train(*, config, batch, directory):
    """Load what `train_save_train` saved, in a new worker, and train twice as it did."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, init_reference_model=False, **paths) as worker:
        rows = my_rows(batch, 4)
        sampled = worker.generate(rows)["output_ids"]
        worker.train(rows, make_loss("nll"))
        result = worker.train(rows, make_loss("nll"))
        return result, shards_of(worker), sampled, parameters_of(worker)


def continue_and_load(*, config, batch, directory, num_before):
    """Save after `num_before` calls; return the shards after one more, and after a load and one."""
    paths = (f"{directory}/weights", f"{directory}/optimizer")
    rows, found = my_rows(batch, 4), []
    with worker_for(config, init_reference_model=False) as worker:
        for _ in range(num_before):
            worker.train(rows, make_loss("nll"))
        worker.save_checkpoint(*paths)
        for _ in range(2):
            worker.train(rows, make_loss("nll"))
            found.append(shards_of(worker))
            worker.load_checkpoint(*paths)
    return found


def resume(*, config, batch, directory):
    """Return the shards after a load in a new worker, and one call."""
    paths = {"weights_path": f"{directory}/weights", "optimizer_path": f"{directory}/optimizer"}
    with worker_for(config, init_reference_model=False, **paths) as worker:
        worker.train(my_rows(batch, 4), make_loss("nll"))
        return shards_of(worker)


def refused_load(*, config, batch, weights_path, optimizer_path):
    """Return the error of a load after a `train` call, and whether it changed anything."""

    def everything(worker):
        state = worker._engine.optimizer.state.optimizer.state
        slots = [dict(state[parameter]) for parameter in worker.model.parameters()]
        tensors = [local_tensor(each).clone() for values in slots for each in values.values()]
        return [*tensors, *shards_of(worker).values()]

    with worker_for(config, init_reference_model=False) as worker:
        worker.train(my_rows(batch, 4), make_loss("nll"))
        before = everything(worker)
        try:
            worker.load_checkpoint(weights_path, optimizer_path)
        except ValueError as error:
            after = everything(worker)
            same = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
            return str(error), same


def start_from_nothing(*, config):
    """Start from a checkpoint that is not there; return what was closed, and what is left."""
    from rl_interfaces.backend import worker as module

    closed, classes = (
        [],
        {name: getattr(module, name) for name in ("Checkpointer", "WeightTransfer")},
    )

    def watched(name):
        class Watched(classes[name]):
            def close(self):
                closed.append(name)
                super().close()

        return Watched

    for name in classes:
        setattr(module, name, watched(name))
    try:
        DTensorPolicyWorker(config, build_tokenizer(), weights_path="/no/such/checkpoint")
    except ValueError as error:
        return closed, torch.distributed.is_initialized(), str(error)
    finally:
        for name, own in classes.items():
            setattr(module, name, own)


def load_only(*, config, weights_path, optimizer_path=None):
    with worker_for(config, init_reference_model=False) as worker:
        worker.load_checkpoint(weights_path, optimizer_path)
        return parameters_of(worker)


def save_twice(*, config, directory):
    """Save, change the weights, save over it; return the parameters of the second save."""
    with worker_for(config, init_reference_model=False) as worker:
        worker.save_checkpoint(f"{directory}/weights")
        worker._add_noise_to_weights()
        worker.save_checkpoint(f"{directory}/weights")
        return parameters_of(worker)


def generate(*, config, batch, greedy=False, num_calls=1):
    """Return each call's output, and `get_logprobs` of the last one's sequences."""
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        rows = my_rows(batch)
        outputs = [dict(worker.generate(rows, greedy=greedy)) for _ in range(num_calls)]
        sequences = type(rows)(
            {
                "input_ids": outputs[-1]["output_ids"],
                "input_lengths": outputs[-1]["unpadded_sequence_lengths"],
            }
        )
        return outputs, worker.get_logprobs(sequences)["logprobs"]


def unsharded_forwards(*, config, batch):
    """Let only rank 0 run forwards inside `unshard_fsdp2_model`; all shards are as before."""
    from rl_dtensor_worker import get_cpu_state_dict, unshard_fsdp2_model

    with worker_for(config, init_reference_model=False) as worker:
        before = shards_of(worker)
        copies = get_cpu_state_dict(worker.model.state_dict().items())
        worker.model.eval()
        with unshard_fsdp2_model(worker.model), torch.no_grad():
            num_forwards = 3 if this_rank()[0] == 0 else 0
            logits = [worker.model(batch["input_ids"]).logits for _ in range(num_forwards)]
        after = shards_of(worker)
        worker.train(my_rows(batch, 4), make_loss("nll"))  # sharded passes still work
        return (
            all(torch.equal(before[n], after[n]) for n in before),
            all(torch.equal(before[n], copies[n]) for n in before),
            logits[-1] if logits else None,
        )


def gradients_around_a_call(*, config, batch, interrupt):
    """Return gradients of a pass between whose halves another call may free whole parameters."""
    from rl_dtensor_worker.parallel.fsdp import reshard_model

    with worker_for(config, init_reference_model=False) as worker:
        (step,) = worker._steps(
            my_rows(batch), local_batch_size=None, given=None, default=batch["input_ids"].shape[0]
        )
        (micro_batch,) = step.micro_batches(worker._engine.info.device)
        scores = worker._engine.forward.logprobs(micro_batch)
        if interrupt:
            reshard_model(worker.model)
        scores.sum().backward()
        return {n: full_tensor(p.grad) for n, p in worker.model.named_parameters()}


def describe(*, config, directory):
    """Return information, and the traces that profiling leaves."""
    os.chdir(directory)
    with worker_for(config) as worker:
        worker.reset_peak_memory_stats()
        worker.start_gpu_profiling()
        torch.ones(4).sum()
        worker.stop_gpu_profiling()
        return {
            "repr": repr(worker),
            "alive": worker.is_alive(),
            "info": worker.get_gpu_info(),
            "device_id": worker.report_device_id(),
            "state": sorted(worker.return_state_dict()),
        }


def score_as_given(*, config, batch):
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return worker.get_logprobs(batch)["logprobs"]


def train_as_given(*, config, batch, loss="nll", gbs=None, mbs=None, **options):
    with worker_for(config, init_reference_model=False, **options) as worker:
        return worker.train(batch, make_loss(loss), gbs=gbs, mbs=mbs)


def devices_in_each_state(*, config, batch):
    """Return, per residency state, the devices of parameters, optimizer state and buffers."""

    def devices(worker):
        state = worker._engine.optimizer.state.optimizer.state.values()
        slots = [v for slots in state for v in slots.values() if v.ndim]
        return tuple(
            {tensor.device.type for tensor in tensors}
            for tensors in (worker.model.parameters(), slots, worker.model.buffers())
        )

    found, memory = {}, {}
    with worker_for(config) as worker:
        worker.train(my_rows(batch, 4), make_loss("nll"))
        for name, call in (
            ("training", worker.prepare_for_training),
            ("inference", worker.prepare_for_lp_inference),
            ("refitting", worker.offload_before_refit),
            ("offloaded", worker.offload_after_refit),
        ):
            call()
            found[name] = devices(worker)
            memory[name] = worker.get_gpu_info()["memory_allocated_mb"]
    return found | {"memory": memory}


def documented_moves(*, config, batch):
    with worker_for(config, init_reference_model=False) as worker:
        before = shards_of(worker)
        moved = worker.move_to_cpu(worker.model)
        devices = {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())}
        back = worker.move_buffer_to_device(worker.move_to_cuda(moved), worker._engine.info.device)
        after = shards_of(worker)
        result = worker.train(my_rows(batch, 4), make_loss("nll"))
        return {
            "same_model": moved is worker.model and back is worker.model,
            "devices": devices,
            "same_shards": all(torch.equal(before[n], after[n]) for n in before),
            "still_trains": bool(torch.isfinite(result["grad_norm"]).all()),
        }


def my_planned_rows(batch, section, num_tokens, *, global_batch_size=None, **options):
    """Return this rank's shard of `batch`, with its plan, and the order of all shards' rows."""
    rank, num_ranks = this_rank()
    name = f"{section}_args"
    shards, order = BatchedDataDict(batch).shard_by_batch_size(
        num_ranks,
        batch_size=global_batch_size,
        **{name: {"max_tokens_per_microbatch": num_tokens, **options}},
    )
    return shards[rank], order


def score_planned(*, config, batch, section, num_tokens, **options):
    """Return this rank's log-probabilities, and the order of all ranks' rows."""
    rows, order = my_planned_rows(batch, section, num_tokens, **options)
    with worker_for(config, init_optimizer=False) as worker:
        logprobs = worker.get_logprobs(rows)["logprobs"]
        reference = worker.get_reference_policy_logprobs(rows)["reference_logprobs"]
        assert torch.equal(logprobs, reference)
        return logprobs, order


def train_planned(*, config, batch, section, num_tokens, num_calls, loss="nll", **options):
    rows, _ = my_planned_rows(
        batch,
        section,
        num_tokens,
        global_batch_size=config["train_global_batch_size"],
        **options,
    )
    with worker_for(config, init_reference_model=False) as worker:
        results = [worker.train(rows, make_loss(loss)) for _ in range(num_calls)]
        return parameters_of(worker), results


def train_as_planned(*, config, batch, section, num_tokens, mbs=None):
    """Train with a plan of this rank's own, which needs not go with the others'."""
    rows, _ = my_planned_rows(batch, section, num_tokens[this_rank()[0]])
    with worker_for(config, init_reference_model=False) as worker:
        return worker.train(rows, make_loss("nll"), mbs=mbs)


def calls_leave_the_batch_alone(*, config, batch, section, num_tokens):
    """Return whether each call left every entry, padding included, as it was."""
    rows = my_rows(batch, 4)
    if section is not None:
        rows, _ = my_planned_rows(batch, section, num_tokens, global_batch_size=4)
    before = rows.writable()
    kept = {}
    with worker_for(config) as worker:
        calls = {
            "get_logprobs": lambda: worker.get_logprobs(rows),
            "get_reference_policy_logprobs": lambda: worker.get_reference_policy_logprobs(rows),
            "generate": lambda: worker.generate(my_rows(batch)),
            "train": lambda: worker.train(rows, make_loss("nll")),
            "train over logits": lambda: worker.train(rows, make_loss("logits")),
        }
        for name, call in calls.items():
            call()
            kept[name] = rows == before
    return kept


def start_with_attention(*, config, attention):
    """Start a worker whose model uses an attention that sees everything before a token."""
    from transformers import AttentionInterface

    def sees_everything(module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        return output.transpose(1, 2), None

    AttentionInterface.register("sees_everything", sees_everything)
    config = config | {"model_name": attention}
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return type(worker.model).__name__


def generate_then_score(*, config, batch, section, num_tokens):
    """Return greedy completions, and the planned log-probabilities of `batch` after them."""
    rows, order = my_planned_rows(batch, section, num_tokens)
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        output = worker.generate(my_rows(batch), greedy=True)
        return output["output_ids"], worker.get_logprobs(rows)["logprobs"], order


def gather_weights(*, config):
    """Return metadata, and two passes over the weights."""
    with worker_for(config, init_reference_model=False) as worker:
        source = worker.weight_source
        passes = [[(name, tensor.clone()) for name, tensor in source] for _ in range(2)]
        return source.metadata(), passes


def stream_weights(*, config, transport, pairs):
    """Train, then stream to receivers in threads: one per rank, or all of them on rank 0.

    Return what each receiver has loaded of both versions, beside the worker's own parameters.
    """
    from concurrent.futures import ThreadPoolExecutor

    from rl_refit import RefitReceiver

    rank, num_ranks = this_rank()
    counts = [1] * num_ranks if pairs else [num_ranks, *[0] * (num_ranks - 1)]
    batch = make_batch(4)
    with worker_for(config, init_reference_model=False) as worker:
        address = worker.open_refit(
            receivers_per_rank=counts, transport=transport, bucket_bytes=1 << 14
        )
        receivers = [
            RefitReceiver(address, rank if pairs else index, timeout_s=60)
            for index in range(counts[rank])
        ]

        def receive(receiver, version):
            loaded = {}
            receiver.begin(version)
            receiver.receive(
                version, lambda tensors: loaded.update((n, t.clone()) for n, t in tensors)
            )
            receiver.commit(version)
            return loaded

        seen = []
        with ThreadPoolExecutor(max(len(receivers), 1)) as pool:
            for version in (1, 2):
                worker.train(my_rows(batch, 4), make_loss("nll"))
                running = [pool.submit(receive, each, version) for each in receivers]
                report = worker.send_weights(version)
                loaded = [future.result(timeout=60) for future in running]
                own = parameters_of(worker)
                seen.append((report, all(_same(each, own) for each in loaded), len(loaded)))
        for receiver in receivers:
            receiver.close()
        return seen


def _same(loaded, own):
    return list(loaded) == list(own) and all(torch.equal(loaded[n], own[n]) for n in own)


def broadcast_weights(*, config, port):
    """Broadcast to two receivers in threads of rank 0; return whether they got the weights."""
    from concurrent.futures import ThreadPoolExecutor

    from rl_refit.compat.broadcast import BroadcastGroup

    rank, _ = this_rank()
    with worker_for(config, init_reference_model=False) as worker:
        info = worker.prepare_info_for_collective()
        own = parameters_of(worker)

        def receive(receiver_rank):
            with BroadcastGroup(
                "127.0.0.1", port, rank=receiver_rank, world_size=3, timeout_s=60
            ) as group:
                return _same(dict(group.receive(info)), own)

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(receive, each) for each in (1, 2)] if rank == 0 else []
            worker.init_collective("127.0.0.1", port, 3)
            worker.broadcast_weights_for_collective()
            return [future.result(timeout=60) for future in running]


def transfers_in_wrong_states(*, config):
    errors = []
    with worker_for(config, init_reference_model=False) as worker:
        for prepare in (worker.prepare_for_training, worker.offload_after_refit):
            prepare()
            for call in (
                lambda: worker.send_weights(1),
                lambda: worker.broadcast_weights_for_collective(),
                lambda: worker.get_weights_ipc_handles(["no such tensor"]),
                lambda: worker.prepare_weights_for_ipc(),
            ):
                try:
                    call()
                except (RuntimeError, ValueError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                else:
                    errors.append("allowed")
    return errors


def gather_groups(*, config):
    """Return metadata, a pass over the tensors, and one over the groups."""
    with worker_for(config, init_reference_model=False) as worker:
        source = worker.weight_source
        passes = [(name, tensor.clone()) for name, tensor in source]
        groups = [(names, [t.clone() for t in each]) for names, each in source.iter_groups()]
        return source.metadata(), passes, groups


@contextmanager
def process_group():
    from rl_interfaces.backend.runtime import RankEnvironment, init_process_group
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    environment = RankEnvironment.from_environment()
    init_process_group(environment, timeout_s=60)
    try:
        yield environment
    finally:
        torch.distributed.destroy_process_group()
        _clear_sharding_prop_cache()


def tensors_of(model):
    """Return every parameter, whole, and every buffer, on the CPU. Collective."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: full_tensor(tensor).cpu().clone() for name, tensor in tensors}


def load_models(*, model_names):
    """Return the tensors of each model, sharded over the data-parallel axis."""
    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.model.build import build_model
    from rl_dtensor_worker.parallel.mesh import Meshes

    loaded = []
    with process_group() as environment:
        for name in model_names:
            config = EngineConfig.from_policy_config(
                make_config(name), world_size=environment.world_size, init_optimizer=True
            )
            device = environment.device
            meshes = Meshes.of(config.layout, replicas=1, device_type=device.type)
            model = build_model(config, meshes=meshes, tensor_parallel=None, device=device)
            loaded.append(tensors_of(model))
            meshes.leave()
    return loaded if environment.rank == 0 else None


def load_over_two_axes(*, model_names):
    """Return each model's tensors and placements, on two data- by two tensor-parallel ranks."""
    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.model.build import ModelLoader

    loaded = []
    with process_group() as environment:
        for name in model_names:
            config = EngineConfig.from_policy_config(
                make_config(name), world_size=4, init_optimizer=True
            )
            model = model_on_meta(name)
            loader = ModelLoader(model, config)
            mesh = shard_over_two_axes(model)
            loader.fill(model, device=environment.device)
            placements = {repr(parameter.placements) for parameter in model.parameters()}
            loaded.append((tensors_of(model), placements))
            # DTensor keeps the mesh, and that its groups with their threads.
            mesh._pg_registry.clear()
    return loaded


def model_on_meta(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(name)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def shard_over_two_axes(model):
    """Cut columns or rows over two tensor-parallel ranks, then rows over two others; the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    styles = {name: ColwiseParallel() for name in columns}
    styles |= {name: RowwiseParallel() for name in rows}
    for layer in model.model.layers:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] in styles:
                parallelize_module(module, mesh["tp"], styles[name.rpartition(".")[2]])
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.tie_weights(recompute_mapping=False)
    return mesh


def load_with_a_broken_rank(*, model_name):
    """Let the last rank fail to read; return the error of each."""
    from rl_dtensor_worker.model import build as loading
    from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles

    class Unreadable(SafetensorsFiles):
        def read(self, name, indices=None):
            raise OSError("planted")

    rank, num_ranks = this_rank()
    if rank == num_ranks - 1:
        loading.SafetensorsFiles = Unreadable
    try:
        load_models(model_names=[model_name])
    except (RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        loading.SafetensorsFiles = SafetensorsFiles
    return None


def call_planned(*, config, batch, method, section=None, num_tokens=24, **arguments):
    """Return what a scoring call gives for this rank's rows, and their order in the batch."""
    rank, num_ranks = this_rank()
    if section is None:
        rows, order = my_rows(batch), list(range(batch.size))
    else:
        budget = {"max_tokens_per_microbatch": num_tokens}
        key = {"dynamic_batching": "dynamic_batching_args"}.get(section, "sequence_packing_args")
        shards, order = batch.shard_by_batch_size(num_ranks, **{key: budget})
        rows = shards[rank]
    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return dict(getattr(worker, method)(rows, **arguments)), order


def calls_of_the_wrong_head(*, config, batch):
    """Return the error of each call that the model's head does not allow."""
    errors = {}
    with worker_for(config, init_reference_model=False) as worker:
        calls = {
            "get_logprobs": lambda: worker.get_logprobs(batch),
            "get_topk_logits": lambda: worker.get_topk_logits(batch, 2),
            "too many": lambda: worker.get_topk_logits(batch, 65),
            "score": lambda: worker.score(batch),
            "generate": lambda: worker.generate(batch),
            "train": lambda: worker.train(batch, make_loss("nll")),
        }
        for name, call in calls.items():
            try:
                call()
            except ValueError as error:
                errors[name] = str(error)
    return errors


def memory_of_swaps(*, config, batch):
    """Return where all tensors of a swap lie, after the first and after the third."""
    from rl_interfaces.backend.components import ReferenceCopy

    with worker_for(config) as worker:
        rows, places = my_rows(batch, 4), []
        for _ in range(3):
            worker.get_reference_policy_logprobs(rows)
            # The copies are inside the closure that the engine returned.
            (reference,) = (
                cell.cell_contents
                for cell in worker._reference.__wrapped__.__closure__
                if isinstance(cell.cell_contents, ReferenceCopy)
            )
            held = [*reference._reference, *reference._policy]
            held += [local_tensor(parameter) for parameter in worker.model.parameters()]
            places.append([tensor.data_ptr() for tensor in held])
            worker.train(rows, make_loss("nll"))
        return places[0], places[-1]


def forwards_around_a_swap(*, config, batch):
    """Return the logits of the model before, inside and after a swap that no call is made in."""
    with worker_for(config) as worker, torch.no_grad():
        worker._add_noise_to_weights()
        before = worker.model(batch["input_ids"]).logits
        with worker.use_reference_model():
            inside = worker.model(batch["input_ids"]).logits
        return before, inside, worker.model(batch["input_ids"]).logits


def saves_that_fail(*, config, directory):
    """Save where it cannot be written; return the errors, and whether a later save loads."""
    import resource
    import signal

    rank, _ = this_rank()
    errors = []

    def attempt(worker, path):
        try:
            worker.save_checkpoint(path)
            worker.finish_checkpoint()
        except (RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("saved")

    @contextmanager
    def no_room():
        """Give the last rank a disk on which files end early."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    if rank == 0:
        (Path(directory) / "mine").mkdir()
        (Path(directory) / "mine" / "thesis.tex").write_text("")
    with worker_for(config, init_reference_model=False) as worker:
        attempt(worker, f"{directory}/file/weights")
        with no_room():
            attempt(worker, f"{directory}/weights")
            attempt(worker, f"{directory}/weights")
        attempt(worker, f"{directory}/mine")
        before = shards_of(worker)
        worker.save_checkpoint(f"{directory}/weights")
        worker._add_noise_to_weights()
        worker.load_checkpoint(f"{directory}/weights")
        after = shards_of(worker)
        return errors, all(torch.equal(before[n], after[n]) for n in before)


def save_with_tokenizer(*, config, weights_path, tokenizer_paths):
    """Save with the tokenizer in several places; return what came of each."""
    outcomes = []
    with worker_for(config, init_reference_model=False) as worker:
        for path in tokenizer_paths:
            try:
                worker.save_checkpoint(weights_path, tokenizer_path=path)
                outcomes.append("saved")
            except ValueError as error:
                outcomes.append(str(error))
    return outcomes


def export(*, config, path, max_bytes):
    with worker_for(config, init_reference_model=False) as worker:
        worker.save_hf_checkpoint(path, max_file_bytes=max_bytes)


def save_over_two_axes(*, model_name, directory):
    """Add 1 to the weights and save them, over two data- by two tensor-parallel ranks."""
    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.model.build import ModelLoader, trained_state
    from rl_dtensor_worker.weights import ModelWeights
    from rl_interfaces.backend.checkpoint.checkpointer import (
        Checkpointer,
        RankRandomState,
        TensorFormat,
    )
    from rl_interfaces.backend.checkpoint.hf_files import write_hf_directory
    from rl_interfaces.backend.engine import HfExport

    with process_group() as environment:
        config = EngineConfig.from_policy_config(
            make_config(model_name), world_size=4, init_optimizer=True
        )
        model = model_on_meta(model_name)
        loader = ModelLoader(model, config)
        shard_over_two_axes(model)
        loader.fill(model, device=environment.device)
        with torch.no_grad():
            for parameter in model.parameters():
                local_tensor(parameter).add_(1)
        layout = TensorFormat(model=model, training=None, weights=lambda: trained_state(model))
        checkpointer = Checkpointer(layout, timeout_s=60)
        random_state = RankRandomState(data_parallel_rank=0, is_written_here=False, state={})
        checkpointer.save(f"{directory}/weights", None, random_state)
        device = environment.device
        source = ModelWeights(model, wire_dtype=torch.float32, device=device)
        export = HfExport(
            write_config=lambda path: model.save_pretrained(path, state_dict={}), source=source
        )
        with checkpointer.replacing(f"{directory}/hf") as path:
            write_hf_directory(export, build_tokenizer(), path, max_file_bytes=20_000)
        checkpointer.close()


def failing_unshard(*, config, batch):
    """Let the last module fail to gather; return how many are whole after that, and still train."""
    from rl_dtensor_worker import unshard_fsdp2_model
    from rl_dtensor_worker.parallel.fsdp import _fsdp_modules, _reshards_after_forward

    def fail():
        raise torch.OutOfMemoryError("planted")

    with worker_for(config, init_reference_model=False) as worker:
        modules = _fsdp_modules(worker.model)
        before = shards_of(worker), [_reshards_after_forward(module) for module in modules]
        modules[-1].unshard = fail
        try:
            with unshard_fsdp2_model(worker.model):
                pass
        except torch.OutOfMemoryError:
            del modules[-1].unshard
        after = shards_of(worker), [_reshards_after_forward(module) for module in modules]
        num_whole = sum(
            not isinstance(parameter, DTensor) for parameter in worker.model.parameters()
        )
        worker.train(my_rows(batch, 4), make_loss("nll"))
        is_same = all(torch.equal(before[0][name], after[0][name]) for name in before[0])
        return num_whole, is_same, before[1] == after[1]


def train_while_saving(*, config, batch, directory):
    """Train while a save is held back, then load it and train again; return what both gave."""
    import threading

    from rl_interfaces.backend.checkpoint.checkpointer import TensorPart

    write, may_write = TensorPart.write, threading.Event()

    def held_back(*arguments):
        assert may_write.wait(60)
        write(*arguments)

    def advance(worker):
        sampled = worker.generate(rows)["output_ids"]
        return worker.train(rows, make_loss("nll")), shards_of(worker), sampled

    rows = my_rows(batch, 4)
    paths = (f"{directory}/weights", f"{directory}/optimizer")
    TensorPart.write = held_back
    try:
        with worker_for(config, init_reference_model=False) as worker:
            worker.train(rows, make_loss("nll"))
            worker.save_checkpoint(*paths)
            first = advance(worker)
            is_on_disk = Path(paths[0]).exists()
            may_write.set()
            worker.load_checkpoint(*paths)
            return is_on_disk, first, advance(worker)
    finally:
        TensorPart.write = write


def num_sharded_modules(*, config):
    from torch.distributed.fsdp import FSDPModule

    with worker_for(config, init_optimizer=False, init_reference_model=False) as worker:
        return sum(isinstance(module, FSDPModule) for module in worker.model.modules())


def threads_of_groups():
    """Return the names of this process's threads that serve a process group or its store."""
    gc.collect()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name or "tcpstore" in name]
