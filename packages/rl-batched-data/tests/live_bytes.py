"""Count the bytes of the tensors that exist while some code runs, on any device, meta included."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Within the context, `peak` is the most bytes that new storages have held at one time."""

    def __init__(self, *outside):
        super().__init__()
        self.live = self.peak = 0
        self._seen = WeakIdKeyDictionary()
        for tensor in outside:
            self._seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        if storage in self._seen:
            return
        self._seen[storage] = True
        self._change(storage.nbytes())
        weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, num_bytes):
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
