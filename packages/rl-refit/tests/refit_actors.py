"""A sender and receivers as processes that take orders, to be killed."""

import contextlib
import multiprocessing as mp
import os
import signal
import tempfile
import time

import torch
from refit_pairs import Engine, some_tensors
from rl_refit import RefitError, RefitSender

# Children of a server that has imported torch start in milliseconds, and it has no threads.
context = mp.get_context("forkserver")
context.set_forkserver_preload(["torch", "rl_refit", "refit_pairs", "refit_actors"])


class Actor:
    """A process that runs `main(pipe, *arguments)`; killed, or told to end."""

    def __init__(self, main, *arguments):
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=main, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    def order(self, *order):
        self.pipe.send(order)

    def answer(self, limit_s):
        """Return what the process has to say; None if it is dead."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            assert self.pipe.poll(limit_s), f"it hangs: {self.process.pid}"
            return self.pipe.recv()
        return None

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.join()

    def join(self):
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(("end",))
        self.process.join(20)
        assert not self.process.is_alive()
        self.pipe.close()


class SlowSource:
    """Tensors whose values are the version's, with a moment between them."""

    def __init__(self, pause_s):
        self.tensors = some_tensors()
        self.pause_s = pause_s

    def metadata(self):
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self):
        for pair in self.tensors.items():
            time.sleep(self.pause_s)
            yield pair


def run_sender(pipe, directory, transport, num_receivers, limit_s):
    """Send on order, and say how it went."""
    tempfile.tempdir = directory
    torch.set_num_threads(1)
    options = {"num_receivers": num_receivers, "timeout_s": limit_s, "bucket_bytes": 8 << 10}
    with RefitSender(SlowSource(0.002), transport, **options) as sender:
        pipe.send(sender.address)
        while (order := pipe.recv())[0] != "end":
            try:
                if order[0] == "send":
                    sender.send(order[1])
                else:
                    sender.commit(order[1])
                pipe.send("done")
            except RefitError as error:
                pipe.send(error)


def run_receiver(pipe, rank, limit_s):
    """Receive on order, and say how it went and what is committed."""
    torch.set_num_threads(1)
    engine = None
    while (order := pipe.recv())[0] != "end":
        try:
            if order[0] == "attach":
                if engine is not None:
                    engine.receiver.close()
                engine = Engine(order[1], rank, timeout_s=limit_s)
                answer = "done"
            elif order[0] == "refit":
                engine.refit(order[1])
                answer = "done"
            elif order[0] == "version":
                answer = engine.receiver.version
            else:
                ready = engine.receiver.require_ready()
                wanted = some_tensors()
                right = all(torch.equal(engine.weights[name], wanted[name]) for name in wanted)
                answer = (ready, right)
        except RefitError as error:
            answer = error
        pipe.send(answer)
