"""Who is asked for what, in which order, with recorders in place of policy and engines."""

from types import SimpleNamespace

import pytest
from rl_policy.config import load_run_config
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.generation.vllm.membership import Membership
from rl_policy.recipes.sft import sft_policy
from rl_policy.refit import ElasticEngines, EngineMembership, WeightLink
from rl_policy.run import samplers
from rl_policy.run.directory import RunState
from rl_policy.run.inputs import (
    check_engines,
    check_shared_devices,
    engine_section,
    staging_mode,
)
from rl_policy.run.samplers import EngineSampler, WorkerSampler
from transformers import LlamaConfig

pytestmark = pytest.mark.needs("rl-policy[dtensor]")


def load(*overrides):
    return load_run_config("grpo", overrides=overrides)


class Recorder:
    """Writes down every call; some return or raise something."""

    membership = None

    def __init__(self, name, calls, answers=()):
        self._name, self._calls, self._answers = name, calls, dict(answers)

    def quantized_tensors(self):
        return ()

    def __getattr__(self, method):
        def call(*args, **kwargs):
            shown = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
            self._calls.append(f"{self._name}.{method}({shown})")
            answer = self._answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class Engines(Recorder):
    num_receivers = 2
    weight_version = -1

    def commit_update(self, version):
        self._calls.append(f"engines.commit_update({version})")
        self.weight_version = version


def build(*, is_colocated, keeps_weights=True, answers=(), **options):
    calls = []
    policy = Recorder("policy", calls, {"send_weights": {"refit_s": 1.5}, **dict(answers)})
    engines = Engines("engines", calls)
    link = WeightLink(policy, engines, is_paired=is_colocated, transport="shm")
    calls.clear()
    sampler = EngineSampler(
        policy,
        engines,
        link,
        is_colocated=is_colocated,
        keeps_weights=keeps_weights,
        **options,
    )
    return calls, engines, sampler


def refit(version):
    return [
        "policy.require_ready_to_send()",
        f"engines.begin_update({version})",
        f"engines.update({version})",
        f"policy.send_weights({version})",
        "engines.wait_for_update(None)",
        f"engines.commit_update({version})",
    ]


def test_vllm_engines_have_all_that_elastic_engines_have():
    for protocol, own in [(ElasticEngines, VllmGeneration), (EngineMembership, Membership)]:
        members = [name for name in vars(protocol) if not name.startswith("_")]
        assert members
        assert all(hasattr(own, name) for name in members)


def test_policy_and_engines_take_turns_on_a_shared_device():
    calls, engines, sampler = build(is_colocated=True)
    with sampler.after_step(0) as source:
        assert source is engines
        calls.append("sample")
    taken = [
        "policy.offload_before_refit()",
        "engines.prepare_for_generation(tags=['weights'])",
        *refit(0),
        "policy.offload_after_refit()",
        "engines.prepare_for_generation(tags=['kv_cache'])",
        "sample",
        "engines.finish_generation()",
        "policy.prepare_for_lp_inference()",
    ]
    assert calls == taken
    report = sampler.report()
    assert report.pop("refit_pause_s") > 0
    assert report == {"refit_s": 1.5, "refit_staged": 0, "weight_version": 0}

    # The same weights again: nothing is sent.
    calls.clear()
    with sampler.after_step(0):
        calls.append("sample")
    assert calls == [call for call in taken if call not in refit(0)]


def test_engines_that_are_replaced_get_the_weights_again_under_the_same_version():
    others = []

    def restart():
        others.append(Engines("others", calls))
        link = WeightLink(policy, others[0], is_paired=False, transport="shm")
        return others[0], link

    calls, engines, sampler = build(is_colocated=False, restart=restart)
    policy = Recorder("policy", calls, {"send_weights": {"refit_s": 1.5}})
    with sampler.after_step(3) as source:
        assert source is engines
    calls.clear()
    sampler.replace_engines()
    assert calls[0] == "engines.shutdown()"
    assert calls[1].startswith("policy.open_refit(2, ")
    assert calls[2:] == ["others.init_transfer(None)"]
    calls.clear()
    with sampler.after_step(3) as source:
        assert source is others[0]
    assert calls[1:4] == ["others.begin_update(3)", "others.update(3)", "policy.send_weights(3)"]
    assert sampler.report()["weight_version"] == 3
    calls.clear()
    sampler.close()
    assert calls == ["others.shutdown()"]


def test_the_device_comes_back_also_after_an_error():
    calls, _, sampler = build(is_colocated=True)
    with pytest.raises(KeyError, match="planted"), sampler.after_step(0):
        raise KeyError("planted")
    assert calls[-2:] == ["engines.finish_generation()", "policy.prepare_for_lp_inference()"]


def test_engines_of_their_own_neither_sleep_nor_make_room():
    calls, _, sampler = build(is_colocated=False)
    for step in (3, 3, 4):
        with sampler.after_step(step):
            calls.append("sample")
    assert calls == [*refit(3), "sample", "sample", *refit(4), "sample"]


def test_engines_that_lose_their_weights_get_them_again_as_a_new_version():
    _, engines, sampler = build(is_colocated=True, keeps_weights=False)
    versions = []
    for step in (0, 0, 1):
        with sampler.after_step(step):
            versions.append(engines.weight_version)
    assert versions == [0, 1, 2]


def test_lost_weights_of_a_run_that_goes_on_get_the_versions_they_would_have_had():
    _, whole, sampler = build(is_colocated=True, keeps_weights=False)
    for step in (0, 1, 1):
        with sampler.after_step(step):
            pass
    saved = sampler.report()["weight_version"]
    with sampler.after_step(1):
        pass
    _, resumed, sampler = build(is_colocated=True, keeps_weights=False, last_version=saved)
    with sampler.after_step(1):
        pass
    assert resumed.weight_version == whole.weight_version == 3


def test_a_failed_refit_waits_for_the_receivers_and_commits_nothing():
    failure = RuntimeError("planted")
    calls, engines, sampler = build(is_colocated=False, answers={"send_weights": failure})
    engines._answers["wait_for_update"] = OSError("gone")
    with pytest.raises(RuntimeError, match="planted") as error, sampler.after_step(0):
        pytest.fail("nothing may be sampled")
    assert calls[-1] == "engines.wait_for_update(None)"
    assert engines.weight_version == -1
    assert error.value.__notes__ == ["the engines: OSError: gone"]


def test_a_refit_that_failed_on_a_shared_device_is_repeated_by_entering_again():
    failure = RuntimeError("planted")
    calls, engines, sampler = build(is_colocated=True, answers={"send_weights": failure})
    with pytest.raises(RuntimeError, match="planted"), sampler.after_step(0):
        pytest.fail("nothing may be sampled")
    # The policy keeps its weights on the device, from where they are sent again.
    assert "policy.offload_after_refit()" not in calls
    sampler._link._policy._answers["send_weights"] = {"refit_s": 1.5}
    calls.clear()
    with sampler.after_step(0):
        assert engines.weight_version == 0
    assert calls[2:8] == refit(0)
    assert calls[-1] == "policy.prepare_for_lp_inference()"


def test_a_policy_that_may_not_send_keeps_no_engine_waiting():
    failure = RuntimeError("the model is not there")
    calls, _, sampler = build(is_colocated=False, answers={"require_ready_to_send": failure})
    with pytest.raises(RuntimeError, match="not there"), sampler.after_step(0):
        pytest.fail("nothing may be sampled")
    assert calls == ["policy.require_ready_to_send()"]


def test_the_workers_own_sampler_is_the_policy():
    calls = []
    policy = Recorder("policy", calls)
    sampler = WorkerSampler(policy)
    with sampler.after_step(7) as source:
        assert source is policy
    assert calls == ["policy.prepare_for_generation()", "policy.finish_generation()"]
    assert sampler.report() == {}


def test_the_engines_follow_the_policy_where_they_say_nothing_themselves():
    config = load("policy.generation.backend=vllm")
    section = engine_section(config, model="a model")
    assert section["model_name"] == "a model"
    assert section["vllm_cfg"]["precision"] == config.policy["precision"]
    assert section["vllm_cfg"]["max_model_len"] == config.policy["max_total_sequence_length"]
    config = load("policy.generation.backend=vllm", "policy.generation.vllm_cfg.precision=bfloat16")
    assert engine_section(config, model="a model")["vllm_cfg"]["precision"] == "bfloat16"


def test_where_engines_run():
    assert not load().has_engines
    colocated = load("policy.generation.backend=vllm")
    assert (colocated.has_engines, colocated.is_colocated) == (True, True)
    apart = load("policy.generation.backend=vllm", "policy.generation.colocated.enabled=false")
    assert (apart.is_colocated, apart.engine_bundles) == (False, [1])
    several = load(
        "policy.generation.backend=vllm",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=2",
        "policy.generation.colocated.resources.num_nodes=3",
    )
    assert several.engine_bundles == [2, 2, 2]


def test_shared_devices_are_empty_while_engines_start(monkeypatch):
    """An engine refuses to start if the policy and its optimizer are where its cache should be."""
    calls, session = [], SimpleNamespace(inputs=SimpleNamespace(tokenizer=None), cluster=None)
    session.config = load("policy.generation.backend=vllm", "refit.transport=shm")

    def start(*arguments, **options):
        calls.append("start")
        return Engines("engines", calls)

    monkeypatch.setattr(samplers, "load_engine", lambda name: start)
    policy = Recorder("policy", calls)
    with samplers.open_sampler(session, policy, model="any", start=RunState()):
        calls.append("run")
    connect = calls.index("start") + 1
    assert calls[:connect] == ["policy.offload_after_refit()", "start"]
    assert calls[connect].startswith("policy.open_refit(2, is_paired=True, transport='shm'")
    assert calls[connect + 1 :] == [
        "engines.init_transfer(None)",
        "engines.finish_generation()",
        "policy.prepare_for_lp_inference()",
        "run",
        "engines.shutdown()",
    ]


def test_engines_apart_get_devices_of_one_node_each_which_end_with_them(monkeypatch):
    calls, asked = [], {}

    def cluster_of(bundles, **options):
        asked.update(options, bundles=bundles)
        return Recorder("cluster", calls)

    def fail_to_start(*arguments, **options):
        raise RuntimeError("no engine starts here")

    monkeypatch.setattr(samplers, "RayVirtualCluster", cluster_of)
    monkeypatch.setattr(samplers, "load_engine", lambda name: fail_to_start)
    config = load(
        "policy.generation.backend=vllm",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=16",
        "cluster.num_gpus_per_node=16",
    )
    session = SimpleNamespace(config=config, inputs=SimpleNamespace(tokenizer=None))
    with (
        pytest.raises(RuntimeError, match="no engine starts here"),
        samplers.open_sampler(session, None, model="any", start=None),
    ):
        pass
    assert asked == {
        "bundles": [16],
        "use_gpus": None,
        "num_gpus_per_node": 16,
        "name": "engines",
        "placement_group_strategy": "STRICT_PACK",
    }
    assert calls == ["cluster.shutdown()"]


def test_the_supervised_part_samples_with_the_workers():
    config = load("policy.generation.backend=vllm", "policy.generation.colocated.enabled=false")
    generation = sft_policy(config)["generation"]
    assert generation["backend"] == "hf"
    assert generation["max_new_tokens"] == config.policy["generation"]["max_new_tokens"]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["policy.generation.vllm_cfg.max_num_seqs=0"], ValueError, "vllm_cfg.max_num_seqs=0"),
        (["policy.generation.vllm_cfg.sped=1"], ValueError, "sped"),
        (["refit.transport=pigeon"], ValueError, "'pigeon' is not among .*'shm'"),
        (
            ["refit.transport=collective", "cluster.use_gpus=true"],
            ValueError,
            r"refit\.transport='collective' with policy.*colocated\.enabled=True: NCCL refuses",
        ),
        (["policy.generation.backend=none-such"], ImportError, "none-such"),
        (["policy.generation.temperature=0.005"], ValueError, r"temperature=0\.005 must be at"),
        (["policy.generation.stop_strings=['']"], ValueError, "must not be empty"),
        (["policy.generation.model_name=other"], ValueError, "model_name='other' contradicts"),
        (["policy.generation.vllm_cfg.weight_transfer=false"], ValueError, "weight_transfer=False"),
        (
            ["policy.generation.vllm_cfg.tensor_parallel_size=3"],
            ValueError,
            r"tensor_parallel_size=3 does not divide the 2 .* cluster\.bundle_ct_per_node_list",
        ),
        (
            [
                "policy.generation.colocated.enabled=false",
                "policy.generation.colocated.resources.gpus_per_node=0",
            ],
            ValueError,
            r"colocated\.resources\.gpus_per_node=0 must be at least 1",
        ),
    ],
)
def test_engines_that_cannot_be_are_refused_before_anything_starts(
    overrides, error, message, monkeypatch
):
    monkeypatch.setattr("rl_policy.generation.vllm.generation.require_vllm", lambda: None)
    backend = "policy.generation.backend="
    # A key is given once.
    default = [] if overrides[0].startswith(backend) else [f"{backend}vllm"]
    with pytest.raises(error, match=message):
        check_engines(load(*default, *overrides))


def test_shared_gpus_need_memory_of_fixed_segments(monkeypatch):
    monkeypatch.setattr("rl_policy.generation.vllm.generation.require_vllm", lambda: None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    on_gpus = load("policy.generation.backend=vllm", "cluster.use_gpus=true")
    with pytest.raises(ValueError, match=r"^PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in"):
        check_engines(on_gpus)
    check_engines(load("policy.generation.backend=vllm", "cluster.use_gpus=false"))


@pytest.mark.parametrize("transport", [None, "shm", "cuda_ipc", "collective", "golden"])
def test_other_devices_take_any_transport(transport):
    unfit = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for is_colocated, on_gpu in ((True, False), (False, True)):
        check_shared_devices(transport, is_colocated=is_colocated, on_gpu=on_gpu, environment=unfit)


@pytest.mark.parametrize(
    ("overrides", "rotary", "allowed"),
    [
        ([], {}, False),
        (["policy.max_total_sequence_length=32"], {}, True),
        (["policy.generation.vllm_cfg.max_model_len=32"], {}, True),
        (
            ["policy.generation.vllm_cfg.engine_kwargs.hf_overrides={max_position_embeddings: 40}"],
            {},
            True,
        ),
        ([], {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, True),
    ],
    ids=["too_long", "policy_fits", "engine_fits", "overridden", "scaled"],
)
def test_an_engine_has_a_position_for_every_token_of_its_longest_row(
    overrides, rotary, allowed, monkeypatch, tmp_path
):
    monkeypatch.setattr("rl_policy.generation.vllm.generation.require_vllm", lambda: None)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaConfig(**sizes, max_position_embeddings=32, rope_parameters=rotary or None)
    model.save_pretrained(tmp_path)
    # A key is given once.
    length = "policy.max_total_sequence_length="
    default = [] if any(each.startswith(length) for each in overrides) else [f"{length}33"]
    config = load(
        "policy.generation.backend=vllm",
        f"policy.model_name={tmp_path}",
        "policy.generation.max_new_tokens=8",
        *default,
        *overrides,
    )
    if allowed:
        check_engines(config)
        return
    with pytest.raises(ValueError, match=r"max_model_len=33, .* max_position_embeddings=32"):
        check_engines(config)


def staged_link(calls, metrics):
    policy = Recorder("policy", calls, {"send_weights": {"refit_s": 1.5, "refit_staged": 1.0}})
    engines = Engines("engines", calls, {"update_metrics": metrics})
    return WeightLink(
        policy, engines, is_paired=False, transport="shm", staging="auto", kv_cache="keep"
    )


def test_a_staged_refit_reports_what_the_engines_say_of_it():
    calls = []
    link = staged_link(calls, {"refit_pause_s": 0.25, "refit_staged": 0.0})
    assert link.refit(3) == {"refit_s": 1.5, "refit_pause_s": 0.25, "refit_staged": 0.0}
    assert "engines.begin_update(3, staging='auto', kv_cache='keep')" in calls
    assert calls[-2:] == ["engines.commit_update(3)", "engines.update_metrics()"]


def test_adapters_go_alone_to_engines_that_hold_the_base():
    """Without it engines pause for everything; with it they stage what is new."""
    calls = []
    policy = Recorder("policy", calls, {"send_weights": {}, "send_adapters": {}})
    holds = {"holds_base": False, "update_metrics": {"refit_staged": 1.0}}
    engines = Engines("engines", calls, holds)
    link = WeightLink(
        policy, engines, is_paired=False, transport="shm", staging="host", adapters="alone"
    )
    assert any("open_refit" in call and "adapters='alone'" in call for call in calls)
    sent = []
    for version, is_held in ((1, False), (2, True), (3, True), (4, False)):
        engines._answers["holds_base"] = is_held
        calls.clear()
        report = link.refit(version)
        begun = next(call for call in calls if "begin_update" in call)
        assert ("staging='host'" in begun) == is_held == (report["refit_staged"] == 1.0)
        sent += [call for call in calls if "policy.send" in call]
    assert sent == [
        "policy.send_weights(1)",
        "policy.send_adapters(2)",
        "policy.send_adapters(3)",
        "policy.send_weights(4)",
    ]


def test_merged_weights_ask_engines_for_nothing_new():
    calls = []
    staged_link(calls, {"refit_pause_s": 0.25, "refit_staged": 1.0}).refit(1)
    assert not any("holds_base" in call for call in calls)


def test_a_backend_that_sends_no_adapters_is_named(monkeypatch):
    pytest.importorskip("rl_megatron_worker")
    monkeypatch.setattr("rl_policy.generation.vllm.generation.require_vllm", lambda: None)
    overrides = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]
    config = load("policy.generation.backend=vllm", "refit.adapters=alone", *overrides)
    told = r"refit\.adapters='alone' .* 'megatron' does not send adapters alone.*send_adapters"
    with pytest.raises(ValueError, match=told):
        check_engines(config)
    adapters = "policy.dtensor_cfg.lora.enabled=true"
    check_engines(load("policy.generation.backend=vllm", "refit.adapters=alone", adapters))


ENGINES = ["policy.generation.backend=vllm", "policy.generation.colocated.enabled=false"]


@pytest.mark.parametrize("staging", ["auto", "host", "off"])
def test_engines_apart_stage_as_configured(staging):
    config = load(*ENGINES, f"refit.staging={staging}")
    assert staging_mode(config, VllmGeneration) == staging


def test_engines_that_cannot_stage_pause():
    colocated = [ENGINES[0], "policy.generation.colocated.enabled=true"]
    assert staging_mode(load(*colocated), VllmGeneration) == "off"
    assert staging_mode(load(*ENGINES), object) == "off"
    with pytest.raises(ValueError, match=r"'host' contradicts .*colocated\.enabled=True"):
        staging_mode(load(*colocated, "refit.staging=host"), VllmGeneration)
    with pytest.raises(ValueError, match="'host' is not possible with object"):
        staging_mode(load(*ENGINES, "refit.staging=host"), object)
