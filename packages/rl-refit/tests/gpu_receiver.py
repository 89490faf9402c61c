"""A receiver on a GPU, in a process of its own."""

import torch
from patience import PATIENCE_S
from refit_pairs import Engine
from rl_refit import RefitError


def receive(pipe, address, device):
    """Refit on order; answer with what was loaded, or with the error."""
    engine = Engine(address, device=device, timeout_s=PATIENCE_S)
    while (version := pipe.recv()) is not None:
        try:
            engine.refit(version)
            assert all(tensor.device == torch.device(device) for tensor in engine.weights.values())
            pipe.send({name: tensor.cpu() for name, tensor in engine.weights.items()})
        except RefitError as error:
            pipe.send(error)
    engine.receiver.close()
