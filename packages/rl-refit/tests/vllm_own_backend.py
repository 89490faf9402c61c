"""Refit a real vLLM on a GPU by vLLM's own `ipc` backend; run by `test_vllm_backends.py`.

Usage: python vllm_own_backend.py DIRECTORY
"""

# ruff: noqa: T201

import copy
import sys

import vllm
from rl_refit import ModuleSource
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm_refits import OTHER, SAME, build_model, change, worst_difference


class Client:
    """The calls of vLLM's sender on an LLM of this process."""

    def __init__(self, llm):
        self.start_weight_update = llm.start_weight_update
        self.finish_weight_update = llm.finish_weight_update
        self.llm = llm

    def init_weight_transfer_engine(self, init_info):
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info):
        self.llm.update_weights({"update_info": update_info})


def main():
    (directory,) = sys.argv[1:]
    model = build_model(directory, tied=True)
    llm = vllm.LLM(
        directory,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        gpu_memory_utilization=0.2,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": "ipc"},
    )
    model = model.cuda()
    source = ModuleSource(model)
    info = IPCTrainerInitInfo(rank=0)
    sender = WeightTransferTrainerFactory.trainer_init(info, client=Client(llm), source=source)
    for _ in range(3):
        change(model)
        own = copy.deepcopy(model).cpu()
        assert worst_difference(llm, own) > OTHER
        sender.send_weights()
        assert worst_difference(llm, own) < SAME
    print("all refits are as they should be")


if __name__ == "__main__":
    main()
