"""Receivers in processes of their own, which the conformance kit drives as if they were here."""

import os
import pickle
from functools import partial

import torch
from patience import PATIENCE_S
from rl_refit import RefitReceiver
from rl_refit.testing import RefitPair
from rl_refit.testing.kills import process_context

_PRELOADED = ["torch", "rl_refit.testing", __name__]


class PairApart(RefitPair):
    """A pair whose receivers are processes; a process that is given one has its receiver itself."""

    def __reduce__(self):
        return partial(RefitPair, verify=self.verify, device=self.device), (self.transport,)

    def open_receiver(
        self, address, rank=0, *, timeout_s=PATIENCE_S, expected=None, into=None, device=None
    ):
        device = device or self.device
        options = {"timeout_s": timeout_s, "expected": expected, "device": device}
        return ReceiverApart((dict(address), rank), options, into)


class ReceiverApart:
    """Hands its calls to a `RefitReceiver` in another process, and what that loads to `load`."""

    def __init__(self, arguments, options, into):
        self._into = into or {}
        self._swap = None
        context = process_context(options["device"], preload=_PRELOADED)
        self._pipe, other = context.Pipe()
        sent = pickle.dumps((arguments, options, self._into))
        self._process = context.Process(target=_serve, args=(other, sent), daemon=True)
        self._process.start()
        other.close()
        self._answer()

    @property
    def version(self):
        return self._call("version")

    def begin(self, version, *, swap=None):
        self._swap = swap
        return self._call("begin", version, swap is not None)

    def receive(self, version, load):
        _send(self._pipe, ("receive", version))
        return self._answer(load)

    def commit(self, version):
        return self._call("commit", version)

    def require_ready(self):
        return self._call("require_ready")

    def signal(self, number):
        os.kill(self._process.pid, number)

    def kill(self):
        self._process.kill()
        self._process.join(PATIENCE_S)
        self._process = None

    def close(self):
        if self._process is not None:
            self._call("close")
            self._process.join(PATIENCE_S)
            assert self._process.exitcode == 0
            self._process.close()
            self._pipe.close()
            self._process = None

    def _call(self, *order):
        _send(self._pipe, order)
        return self._answer()

    def _answer(self, load=None):
        while True:
            kind, value = _receive(self._pipe)
            if kind == "raised":
                raise value
            if kind == "returned":
                return value
            if kind == "into":
                for name, tensor in value.items():
                    self._into[name].copy_(tensor)
                continue
            try:
                self._swap() if kind == "swap" else load(value)
                _send(self._pipe, None)
            except Exception as error:
                _send(self._pipe, error)


def _serve(pipe, sent):
    """Answer calls until the receiver is closed."""
    torch.set_num_threads(1)
    served = _Served(pipe, *pickle.loads(sent))
    _send(pipe, ("returned", None))
    name = ""
    while name != "close":
        name, *values = _receive(pipe)
        served.respond(name, *values)


class _Served:
    """A receiver whose loads and swaps are asked for over the pipe."""

    def __init__(self, pipe, arguments, options, into):
        self._pipe = pipe
        self._device = torch.device(options["device"])
        self._into = {name: tensor.to(self._device) for name, tensor in into.items()}
        self._receiver = RefitReceiver(*arguments, into=self._into, **options)

    def respond(self, name, *values):
        try:
            own = getattr(self, name, None)
            result = own(*values) if own else getattr(self._receiver, name)(*values)
            _send(self._pipe, ("returned", result))
        except Exception as error:
            _send(self._pipe, ("raised", error))

    def version(self):
        return self._receiver.version

    def begin(self, version, has_swap):
        swap = partial(self._ask, "swap", None) if has_swap else None
        return self._receiver.begin(version, swap=swap)

    def receive(self, version):
        report = self._receiver.receive(version, self._load)
        _send(self._pipe, ("into", {name: tensor.cpu() for name, tensor in self._into.items()}))
        return report

    def _load(self, tensors):
        assert all(tensor.device == self._device for _, tensor in tensors)
        self._ask("load", [(name, tensor.cpu()) for name, tensor in tensors])

    def _ask(self, *order):
        _send(self._pipe, order)
        # What is asked may ask in turn, before it answers.
        while isinstance(message := _receive(self._pipe), tuple):
            self.respond(*message)
        if message is not None:
            raise message


# By value: a pipe's own way would share the memory of a tensor, and leave files open for it.


def _send(pipe, message):
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe):
    assert pipe.poll(PATIENCE_S), f"no message within {PATIENCE_S:g} s"
    return pickle.loads(pipe.recv_bytes())
