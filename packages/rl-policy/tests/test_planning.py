"""`rl-policy plan`: sizes, phases, advice, and plans of real workers."""

import json
import sys

import pytest
from forked_python import rank_python
from rl_interfaces import ParallelLayout, resolve_policy_config
from rl_interfaces.backend.memory import Depths, PhaseTrace, WorkerTrace
from rl_policy.cli import build_app
from rl_policy.generation.vllm.config import EngineConfig
from rl_policy.planning import EngineShare, MemoryPlan, parse_bytes, plan_memory
from rl_policy.planning.compose import RunMemory, compose
from rl_policy.planning.engines import cache_bytes_per_token, share_of_engine
from torch import nn
from transformers import LlamaConfig, MixtralConfig
from typer.testing import CliRunner

GIB = 2**30
LLAMA_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=8192,
    architectures=["LlamaForCausalLM"],
    eos_token_id=2,
)

pytestmark = pytest.mark.needs("rl-policy[dtensor]")


@pytest.fixture(autouse=True)
def forked_plans(monkeypatch):
    """Start the process of a plan with what it imports."""
    monkeypatch.setattr(sys, "executable", rank_python())


def run(*arguments):
    return CliRunner().invoke(build_app(), ["plan", *arguments])


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("1.5 GiB", 1.5 * GIB), ("640mb", 640 * 10**6)]
)
def test_sizes_with_a_unit(text, size):
    assert parse_bytes(text, key="--memory") == size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8", "--memory", "80"], "--memory='80' must be a number with a unit"),
        (["--gpus", "8", "--memory", "80parsecs"], "for example --memory=80GB"),
        (["--gpus", "8", "--memory", "0GB"], "--memory='0GB' must be positive"),
        (["--gpus", "8", "--memory", "8GB", "--reserve", "1"], "--reserve='1'"),
        (
            ["--gpus", "8", "--memory", "8GB", "--reserve", "8GB"],
            "--reserve=8GB leaves nothing of --memory=8GB",
        ),
        (["--gpus", "0", "--memory", "80GB"], "--gpus=0 must be at least 1"),
        (["--gpus", "12", "--memory", "80GB"], "--gpus=12 is not a multiple of --gpus-per-node=8"),
    ],
)
def test_a_wrong_size_is_one_line_and_status_2(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert said in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["policy.dtensor_cfg.tensor_parallel_size=3"],
            "policy.dtensor_cfg.tensor_parallel_size=3",
        ),
        (["policy.dtensor_cfg.cpu_offload=true"], "cpu_offload=True cannot be planned"),
        (["policy.dtensor_cfg.lora.enabled=true"], "lora.enabled=True cannot be planned"),
        (["policy.model_name=./nowhere"], "nowhere"),
        (["polcy.seed=1"], "polcy"),
    ],
)
def test_settings_that_cannot_run_are_one_line_and_status_2(settings, said):
    result = run("--gpus", "4", "--memory", "80GB", *settings)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert said in line


def write_mixture(path):
    MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=256,
        num_local_experts=4,
        architectures=["MixtralForCausalLM"],
        eos_token_id=2,
    ).save_pretrained(path)
    return f"policy.model_name={path}"


@pytest.mark.slow
def test_experts_are_planned_in_bfloat16_alone(tmp_path):
    settings = [write_mixture(tmp_path), "policy.max_total_sequence_length=256"]
    refused = r"policy\.precision=float32 cannot .*policy\.precision=bfloat16$"
    with pytest.raises(ValueError, match=refused):
        plan_memory(settings, gpus=2, memory="80GB")
    plan = plan_memory([*settings, "policy.precision=bfloat16"], gpus=2, memory="80GB")
    # So small a model is replicated.
    size = plan.num_parameters * 4 / GIB
    assert in_gib(plan.phase("train"))["parameters"] == pytest.approx(size, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["distill", "ppo"])
def test_a_recipe_of_several_policies_is_refused(recipe):
    result = run("--recipe", recipe, "--gpus", "2", "--memory", "80GB")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert f"recipe='{recipe}' has 2 policies on the same devices" in line


def trace(*, layers, state=True):
    """Return a worker's trace whose numbers are lines in the layers, in GiB."""
    parameters, optimizer = layers * GIB, 2 * layers * GIB
    peaks = {
        # The head has the peak of a shallow model, the first layer that of a deep one.
        "pass 1, head": parameters + optimizer + 20 * GIB,
        "pass 1, backward of the first layer": 2 * parameters + optimizer + GIB,
    }
    phases = {
        "load": PhaseTrace({"before": parameters + GIB}, 0, parameters),
        "score": PhaseTrace({"pass 1, head": parameters + 2 * GIB}, parameters, parameters),
        "train": PhaseTrace(peaks, parameters, parameters + optimizer),
        "gather": PhaseTrace({"before": parameters + optimizer + 3 * GIB}),
    }
    return WorkerTrace(phases=phases, model_bytes=parameters, optimizer_bytes=optimizer, weights=[])


def engine_of(**values):
    given = {
        "weights_bytes": 10 * GIB,
        "activation_bytes": GIB,
        "cache_bytes": 20 * GIB,
        "cache_tokens": 1000,
        "cache_rows": 2.0,
        "longest": 500,
        "is_colocated": True,
        "gpu_memory_utilization": 0.5,
        "best_utilization": 0.9,
    }
    return EngineShare(**(given | values))


def plan_of(*, memory, on_gpu=True, engine=None, policy=None):
    config = {"model_name": "m", "dtensor_cfg": {"enabled": True}, "max_total_sequence_length": 64}
    return compose(
        RunMemory(
            traces={4: trace(layers=4), 6: trace(layers=6)},
            depths=Depths(traced=(4, 6), num_layers=40),
            buffer_bytes=0 if engine is None else GIB,
            on_gpu=on_gpu,
            engine=engine,
        ),
        policy=resolve_policy_config(config | (policy or {})),
        layout=ParallelLayout(data_parallel=4),
        text=LLAMA_70B,
        memory=memory * GIB,
        reserve=GIB,
        bucket_bytes=None if engine is None else GIB // 2,
        num_parameters=10**9,
    )


def in_gib(phase):
    return {part.name: part.bytes / GIB for part in phase.parts}


def test_each_place_has_a_line_of_its_own():
    # At 4 and 6 layers the head has the peak, 32 and 38 GiB: its line gives 140 at 40 layers.
    train = plan_of(memory=200).phase("train")
    assert train.bytes == 161 * GIB
    assert train.place == "pass 1, backward of the first layer"


def test_what_is_offloaded_leaves_a_gpu_and_stays_on_a_cpu():
    engine = engine_of()
    on_gpu, on_cpu = (plan_of(memory=300, engine=engine, on_gpu=each) for each in (True, False))
    assert in_gib(on_gpu.phase("score")) == {
        "parameters": 40,
        "gradients, activations, gathers": 2,
        "refit buffers": 1,
    }
    assert in_gib(on_gpu.phase("refit")) == {
        "parameters": 40,
        "gradients, activations, gathers": 3,
        "refit buffers": 1,
        "engine weights": 10,
    }
    assert on_gpu.phase("generate").bytes == 32 * GIB
    assert on_gpu.host_bytes == 120 * GIB
    assert on_cpu.phase("generate").bytes == 152 * GIB
    assert in_gib(on_cpu.phase("score"))["optimizer state"] == 80
    assert on_cpu.host_bytes == 0


def test_engines_on_devices_of_their_own_are_apart():
    plan = plan_of(memory=300, engine=engine_of(is_colocated=False))
    assert [phase.name for phase in plan.phases] == ["load", "score", "train", "refit"]
    assert [phase.name for phase in plan.engine_phases] == ["wake", "generate"]
    assert "engine weights" not in in_gib(plan.phase("refit"))
    # Its buffers are there too, on a CPU as on a GPU; the policy is not.
    for on_gpu in (True, False):
        apart = plan_of(memory=300, engine=engine_of(is_colocated=False), on_gpu=on_gpu)
        (generate,) = [phase for phase in apart.engine_phases if phase.name == "generate"]
        assert in_gib(generate) == {
            "refit buffers": 1,
            "engine weights": 10,
            "key-value cache": 20,
            "engine activations": 1,
        }


def test_what_does_not_fit_is_marked_and_has_a_way_out():
    assert plan_of(memory=162).fits
    assert "refit.bucket_mib below 512" in str(plan_of(memory=40, engine=engine_of()).advice)
    plan = plan_of(memory=161, policy={"train_micro_batch_size": 4})
    assert not plan.fits
    assert "policy.train_micro_batch_size=2" in str(plan.advice)
    assert "activation_checkpointing=true" in str(plan.advice)
    (marked,) = [line for line in str(plan).splitlines() if "TOO MUCH" in line]
    assert marked.startswith("train")
    assert str(plan).endswith("it does not fit")


def test_a_cache_of_less_than_a_row_has_a_way_out():
    plan = plan_of(memory=300, engine=engine_of(cache_rows=0.5))
    assert "gpu_memory_utilization towards 0.9" in str(plan.advice)


def test_a_plan_survives_json():
    plan = plan_of(memory=300, engine=engine_of())
    assert MemoryPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_cache_of_a_token():
    assert cache_bytes_per_token(LLAMA_70B, itemsize=2, ranks=8) == 2 * 80 * 1 * 128 * 2
    # With more ranks than heads, each has one.
    assert cache_bytes_per_token(LLAMA_70B, itemsize=2, ranks=16) == 2 * 80 * 1 * 128 * 2


def test_chosen_experts_have_activations_of_their_own():
    mixture = MixtralConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_experts_per_tok=2,
        vocab_size=32,
        max_position_embeddings=4096,
    )
    engine = EngineConfig(
        model_name="m",
        is_colocated=True,
        seed=0,
        tensor_parallel_size=2,
        max_model_len=4096,
        engine_kwargs={"max_num_batched_tokens": 1000},
    )
    model = nn.Linear(4, 4, device="meta")
    share = share_of_engine(engine, mixture, model, memory=80 * GIB, reserve=GIB, beside=0)
    # For each token three rows of 1024 and an MLP's 4096 of each rank, and for each of the two
    # experts the first product, 4096 on each rank, and the activation of half of it.
    expected = 1000 * (3 * 1024 + 4096 + 2 * (4096 + 2048)) * 2
    assert share.activation_bytes == expected


def test_an_engine_takes_its_share_of_the_device():
    engine = EngineConfig(
        model_name="m", is_colocated=True, seed=0, gpu_memory_utilization=0.5, max_model_len=4096
    )
    model = nn.Linear(2**14, 2**14, bias=True, device="meta")
    share = share_of_engine(engine, LLAMA_70B, model, memory=80 * GIB, reserve=4 * GIB, beside=GIB)
    assert share.weights_bytes == 2 * (2**28 + 2**14)
    assert share.bytes == 40 * GIB
    assert share.cache_rows == share.cache_tokens / 4096
    assert share.best_utilization == 0.9


@pytest.mark.slow
def test_the_built_in_model_fits_on_two_cpus():
    plan = plan_memory(["cluster.use_gpus=false"], gpus=2, memory="1GiB")
    assert [phase.name for phase in plan.phases] == ["load", "score", "train", "generate"]
    assert plan.traced_layers == (2,)
    state = in_gib(plan.phase("train"))
    # Both moments of AdamW, and less than 200 KiB that a worker keeps from one call to the next.
    moments = 2 * state["parameters"]
    assert moments <= state["optimizer state"] <= moments + 200 / 2**20


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_on_64_ranks(tmp_path):
    LLAMA_70B.save_pretrained(tmp_path)
    settings = [
        f"policy.model_name={tmp_path}",
        "policy.precision=bfloat16",
        "policy.max_total_sequence_length=4096",
        "policy.dtensor_cfg.tensor_parallel_size=8",
        "policy.dtensor_cfg.activation_checkpointing=true",
        "policy.train_global_batch_size=64",
        "policy.train_micro_batch_size=1",
        "policy.logprob_batch_size=1",
        "policy.generation.backend=vllm",
        "policy.generation.vllm_cfg.tensor_parallel_size=8",
    ]
    plan = plan_memory(settings, gpus=64, memory="80GB")
    assert (plan.traced_layers, plan.num_layers) == ((4, 6), 80)
    assert plan.num_parameters == 70_553_706_496
    train = in_gib(plan.phase("train"))
    # Float32 over all ranks; AdamW's moments; the engine's weights in bfloat16 over eight.
    shard = plan.num_parameters * 4 / 64 / GIB
    assert train["parameters"] == pytest.approx(shard, rel=0.02)
    assert train["optimizer state"] == pytest.approx(2 * shard, rel=0.02)
    assert plan.engine.weights_bytes == pytest.approx(plan.num_parameters * 2 / 8, rel=0.01)
    assert plan.bucket_bytes <= 256 * 2**20
    assert plan.fits
