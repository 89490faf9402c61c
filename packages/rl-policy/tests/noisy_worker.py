"""A worker that makes the noise that libraries make in a rank's process."""

import sys
import warnings

from transformers.utils import logging as transformers_logging


class NoisyWorker:
    """Draws a bar and warns, before it is called and in a call."""

    def __init__(self):
        self.make_noise()

    def make_noise(self):
        for _ in transformers_logging.tqdm(range(3), desc="Writing model shards"):
            pass
        warnings.warn("the old name goes", FutureWarning, stacklevel=1)
        warnings.warn("a loss is not finite", UserWarning, stacklevel=1)
        sys.stderr.write("a line of the worker's own\n")

    def shutdown(self):
        pass
