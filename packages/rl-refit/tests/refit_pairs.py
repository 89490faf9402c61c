"""A sender and its receivers in threads of one process."""

import threading

import torch
from rl_refit import RefitReceiver, RefitSender, TensorSource

LIMIT_S = 20.0


class Engine:
    """Holds what a receiver has loaded, as an inference engine would."""

    def __init__(self, address, rank=0, **options):
        self.receiver = RefitReceiver(address, rank, **{"timeout_s": LIMIT_S, **options})
        self.weights = {}
        self.order = []
        self.load_keeps = True

    def load(self, tensors):
        for name, tensor in tensors:
            self.weights[name] = tensor.clone()
            self.order.append(name)

    def refit(self, version):
        self.order.clear()
        self.receiver.begin(version)
        return self.receiver.receive(version, self.load, load_keeps=self.load_keeps)


def some_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {"embed.weight": normal(64, 48)}
    for layer in range(3):
        tensors[f"layers.{layer}.qkv.weight"] = normal(48, 40)
        tensors[f"layers.{layer}.mlp.weight"] = normal(40, 64).bfloat16()
        tensors[f"layers.{layer}.norm.weight"] = normal(41).half()
    tensors["steps"] = torch.randint(-9, 9, (7,), generator=generator)
    tensors["head.weight"] = normal(300, 48)
    return tensors


def same(left, right):
    """Whether two dicts of tensors are equal bit by bit, in the same order."""
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].contiguous().view(-1).view(torch.uint8).tolist()
        == right[name].contiguous().view(-1).view(torch.uint8).tolist()
        for name in left
    )


def make_sender(tensors, transport="shm", num_receivers=1, **options):
    options = {"bucket_bytes": 16 << 10, "timeout_s": LIMIT_S, **options}
    return RefitSender(TensorSource(tensors), transport, num_receivers, **options)


def outcomes(*calls, limit_s=2 * LIMIT_S):
    """Run the calls at the same time; return what each returned or raised."""
    results = [AssertionError("it hangs")] * len(calls)

    def run(index, call):
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return results


def refit(sender, engines, version):
    """Run one refit; return the outcomes of the sender and of each engine."""
    return outcomes(
        lambda: sender.send(version), *[lambda e=engine: e.refit(version) for engine in engines]
    )


def must(results):
    """Return the results, if none is an error."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
