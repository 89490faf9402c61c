"""The scope in which Megatron-core runs without a GPU, and what it leaves behind: nothing."""

import os
import threading

import pytest
import torch
from forked_ranks import RankPool
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from patience import PATIENCE_S
from rl_interfaces.backend.runtime import RankEnvironment
from rl_megatron_worker.compat import cpu_scope as cpu_scope_module
from rl_megatron_worker.compat.cpu_scope import check_megatron_is_known, cpu_scope
from rl_megatron_worker.runtime import Runtime

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the scope is for the CPU")

_OWNERS = (
    torch.autograd,
    torch.cuda,
    torch.cuda.random,
    torch.Tensor,
    megatron_random,
    token_dispatcher,
    moe_utils,
    distrib_optimizer,
    megatron_random.torch,
)


def everything():
    """Return every attribute of whatever could be patched, by identity."""
    return [{name: id(value) for name, value in vars(owner).items()} for owner in _OWNERS]


@pytest.fixture
def runtime():
    device = torch.device("cpu")
    return Runtime(RankEnvironment(rank=0, world_size=1, local_rank=0, device=device))


def assert_cuda_is_absent():
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_cuda_means_the_cpu_inside(runtime):
    with runtime.scope():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.zeros(2).to("cuda").device.type == "cpu"
        assert torch.zeros(2).to(device="cuda:0", dtype=torch.int).dtype is torch.int
        assert torch.empty(2, pin_memory=True).device.type == "cpu"
        values = torch.zeros(2)
        assert values.cuda() is values
        assert values.pin_memory().data_ptr() != values.data_ptr()
        assert values.type() == "torch.cuda.FloatTensor"
        assert values.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert values.type(torch.int64).dtype is torch.int64
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"


def test_random_states_are_those_of_the_cpu_inside(runtime):
    with runtime.scope():
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(2)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(2), first)
        assert torch.equal(torch.Generator().manual_seed(3).get_state(), state)


def test_nothing_is_left_behind(runtime):
    before = everything()
    assert_cuda_is_absent()
    with runtime.scope():
        assert everything() != before
    assert everything() == before
    assert_cuda_is_absent()


def test_nothing_is_left_behind_after_an_exception(runtime):
    before = everything()
    with pytest.raises(ZeroDivisionError), runtime.scope(), runtime.scope():
        raise ZeroDivisionError
    assert everything() == before
    assert_cuda_is_absent()


def test_entering_again_changes_nothing_and_undoes_once(runtime):
    with runtime.scope():
        inside = everything()
        with runtime.scope():
            assert everything() == inside
        assert everything() == inside
        assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_attributes_stay_while_another_thread_is_inside(runtime):
    before = everything()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with runtime.scope():
            entered.set()
            assert leave.wait(timeout=PATIENCE_S)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(timeout=PATIENCE_S)
    with runtime.scope():
        inside = everything()
    assert everything() == inside
    leave.set()
    thread.join(timeout=PATIENCE_S)
    assert everything() == before


def test_what_torch_does_with_cuda_is_changed_in_the_thread_that_entered_alone(runtime):
    found = []

    def other():
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError) as error:
            found.append(error)

    with runtime.scope():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=PATIENCE_S)
    assert found


def test_backward_passes_are_inside_too(runtime):
    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.ones(1, device="cuda")

    values = torch.ones(1, requires_grad=True)
    with runtime.scope():
        Probe.apply(values).sum().backward()
        torch.autograd.backward(Probe.apply(values).sum())
        torch.autograd.grad(Probe.apply(values).sum(), values)
    assert values.grad == 2


@pytest.mark.parametrize(
    "version", [(0, 15, 9), (0, 16, 0), (0, 17, 1), (0, 18, 2), (0, 19, 0), (0, 20, 0), (1, 0, 0)]
)
def test_a_megatron_core_of_another_version_is_refused(version):
    numbers = ".".join(map(str, version))
    with pytest.raises(RuntimeError, match=rf"megatron-core {numbers} .* megatron-core>=0.16.1,<0"):
        check_megatron_is_known(version)


def test_what_is_missing_is_named(monkeypatch):
    check_megatron_is_known.cache_clear()
    monkeypatch.delattr(token_dispatcher, "maybe_move_tensor_to_cpu")
    with pytest.raises(RuntimeError, match=r"dispatcher\.maybe_move_tensor_to_cpu"), cpu_scope():
        pytest.fail("it is not to be entered")
    assert_cuda_is_absent()


def test_the_scope_does_nothing_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = everything()
    with cpu_scope():
        assert everything() == before
    assert not cpu_scope_module._patches.entered


def test_ranks_of_a_machine_with_gpus_are_no_forks():
    """CUDA refuses a process whose parent has asked for it, as Megatron-core's import does."""
    assert RankPool(1, num_gpus=1).run(os.getppid) == [os.getpid()]
