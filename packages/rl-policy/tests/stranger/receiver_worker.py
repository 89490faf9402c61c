"""An engine's rank that only receives: on its own GPU, or on the CPU where Ray gives it none."""

import os

import torch
from patience import PATIENCE_S
from rl_refit import RefitReceiver
from rl_refit.compat.broadcast import BroadcastGroup


class ReceiverWorker:
    def __init__(self):
        has_gpu = torch.cuda.is_available()
        self.device = f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu"
        self.receiver = self.group = None

    def connect(self, address):
        self.receiver = RefitReceiver(address, timeout_s=PATIENCE_S, device=self.device)

    def receive(self, version):
        """Return what arrives, on the CPU, and the type of the device on which it did."""
        loaded, devices = {}, set()

        def load(tensors):
            for name, tensor in tensors:
                loaded[name] = tensor.cpu().clone()
                devices.add(tensor.device.type)

        self.receiver.begin(version)
        self.receiver.receive(version, load)
        self.receiver.commit(version)
        return loaded, devices

    def join(self, ip, port, world_size):
        self.group = BroadcastGroup(
            ip, port, rank=1, world_size=world_size, device=self.device, timeout_s=PATIENCE_S
        )

    def receive_broadcast(self, info):
        received = dict(self.group.receive(info))
        devices = {tensor.device.type for tensor in received.values()}
        return {name: tensor.cpu() for name, tensor in received.items()}, devices

    def shutdown(self):
        for each in (self.receiver, self.group):
            if each is not None:
                each.close()
