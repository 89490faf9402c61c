"""Configurations of NeMo RL's shapes, made by hand, as runs of ours."""

import pytest
import yaml
from rl_policy.cli import build_app
from rl_policy.commands.convert_config import convert
from rl_policy.config import load_run_config
from rl_policy.recipes.distill import DistillSection, teacher_policy
from rl_policy.recipes.dpo import DpoSection
from rl_policy.recipes.grpo_config import GrpoSection, LossSection
from rl_policy.recipes.policy_gradient.async_rollouts import AsyncSection
from rl_policy.recipes.reward_model import RmSection
from rl_policy.recipes.sft import SftSection
from typer.testing import CliRunner

pytestmark = pytest.mark.needs("rl-policy[dtensor]")

# The shape of an example for GRPO: sections, interpolations and values as they are written there.
GRPO = """
grpo:
  num_prompts_per_step: 8
  num_generations_per_prompt: 4
  max_rollout_turns: 1
  max_num_epochs: 1
  max_num_steps: 300
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 20
  val_at_start: false
  overlong_filtering: false
  max_val_samples: 64
  val_batch_size: 64
  seed: 7
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn:
  reference_policy_kl_penalty: 0.02
  ratio_clip_min: 0.1
  ratio_clip_max: 0.3
  ratio_clip_c: null
  use_on_policy_kl_approximation: false
  use_importance_sampling_correction: false
  token_level_loss: false
checkpointing:
  {enabled: true, checkpoint_dir: out, metric_name: val_reward, keep_top_k: 4, save_period: 5}
policy:
  model_name: some/model
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 32
  train_micro_batch_size: 2
  generation_batch_size: 16
  logprob_batch_size: 2
  max_total_sequence_length: 256
  precision: bfloat16
  logprob_chunk_size: null
  dtensor_cfg:
    _v2: true
    enabled: true
    cpu_offload: false
    sequence_parallel: false
    activation_checkpointing: false
    tensor_parallel_size: 2
    context_parallel_size: 1
    custom_parallel_plan: null
    lora_cfg: {enabled: false, dim: 8, alpha: 32, dropout: 0.0, dropout_position: post}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 1, fp8_cfg: null, env_vars: null}
  dynamic_batching: {enabled: false}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
    algorithm: modified_first_fit_decreasing
    sequence_length_round: 64
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer:
    name: torch.optim.AdamW
    kwargs:
      {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1e-8, foreach: false, fused: false}
  scheduler:
    - name: torch.optim.lr_scheduler.LinearLR
      kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - milestones: [50]
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_p: 1.0
    top_k: null
    stop_token_ids: null
    stop_strings: null
    vllm_cfg:
      async_engine: false
      precision: ${policy.precision}
      tensor_parallel_size: 1
      pipeline_parallel_size: 1
      gpu_memory_utilization: 0.6
      max_model_len: ${policy.max_total_sequence_length}
      enforce_eager: false
      use_deep_gemm: false
    vllm_kwargs: {max_num_batched_tokens: 4096}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  prompt_file: null
  dataset_name: OpenMathInstruct-2
  shuffle: true
env: {math: {num_workers: 8}}
logger: {log_dir: logs, wandb_enabled: false, wandb: {project: x, name: y}}
cluster: {gpus_per_node: 4, num_nodes: 2}
"""
MEGATRON = """
defaults: grpo.yaml
policy:
  optimizer: null
  scheduler: null
  dtensor_cfg: {enabled: false}
  make_sequence_length_divisible_by: ${policy.megatron_cfg.tensor_model_parallel_size}
  megatron_cfg:
    enabled: true
    converter_type: Qwen2ForCausalLM
    tensor_model_parallel_size: 2
    expert_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    pipeline_model_parallel_size: 2
    num_layers_in_first_pipeline_stage: null
    context_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    sequence_parallel: true
    freeze_moe_router: true
    moe_router_dtype: fp64
    moe_router_load_balancing_type: none
    moe_router_bias_update_rate: 0.0
    moe_permute_fusion: false
    apply_rope_fusion: true
    env_vars: {NCCL_DEBUG: WARN}
    defer_fp32_logits: null
    activation_checkpointing: true
    peft: {enabled: false, dim: 8}
    optimizer:
      optimizer: adam
      lr: 5.0e-7
      min_lr: 5.0e-8
      weight_decay: 0.0
      bf16: true
      fp16: false
      params_dtype: float32
      adam_beta1: 0.9
      adam_beta2: 0.999
      adam_eps: 1e-8
      use_distributed_optimizer: true
      use_precision_aware_optimizer: true
      clip_grad: ${policy.max_grad_norm}
    scheduler:
      start_weight_decay: ${policy.megatron_cfg.optimizer.weight_decay}
      end_weight_decay: ${policy.megatron_cfg.optimizer.weight_decay}
      weight_decay_incr_style: constant
      lr_decay_style: constant
      lr_decay_iters: 1000
      lr_warmup_iters: 13
      lr_warmup_init: 5.0e-8
    distributed_data_parallel_config:
      grad_reduce_in_fp32: false
      overlap_grad_reduce: true
      overlap_param_gather: true
      average_in_collective: true
      use_custom_fsdp: false
      data_parallel_sharding_strategy: optim_grads_params
"""
POLICY = """
  model_name: some/model
  train_global_batch_size: 32
  train_micro_batch_size: 2
  max_total_sequence_length: 256
  precision: bfloat16
  dtensor_cfg: {_v2: false, enabled: true, tensor_parallel_size: 1, context_parallel_size: 1}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6}}
"""
SFT = f"""
sft: {{max_num_epochs: 1, max_num_steps: 60, val_period: 0, val_batches: 8, seed: 42}}
policy:{POLICY}
data:
  train: {{dataset_name: ResponseDataset, data_path: train.jsonl, input_key: question}}
  validation: {{data_path: val.jsonl}}
  default: {{prompt_file: null}}
checkpointing: {{enabled: true, save_period: 10}}
cluster: {{gpus_per_node: 1, num_nodes: 1}}
"""
DPO = f"""
dpo:
  max_num_epochs: 1
  max_num_steps: 150
  val_period: 25
  val_global_batch_size: 32
  seed: 42
  reference_policy_kl_penalty: 0.05
  preference_average_log_probs: false
  sft_average_log_probs: ${{.preference_average_log_probs}}
  preference_loss_weight: 1
  sft_loss_weight: 0.1
policy:{POLICY}
data: {{dataset_name: HelpSteer3, max_input_seq_length: 256}}
cluster: {{gpus_per_node: 8, num_nodes: 1}}
"""
REWARD_MODEL = f"""
rm: {{max_num_epochs: 1, max_num_steps: -1, val_period: 16, val_batches: -1, seed: 3}}
policy:{POLICY}
  reward_model_cfg: {{enabled: true, reward_model_type: bradley_terry}}
data:
  dataset_name: BinaryPreferenceDataset
  train_data_path: pairs.jsonl
  val_data_paths: {{one: heldout.jsonl, two: more.jsonl}}
  prompt_key: question
  chosen_key: better
  rejected_key: worse
cluster: {{gpus_per_node: 1, num_nodes: 1}}
"""
# Its teacher is the policy but for some keys, which YAML merges.
DISTILLATION = """
distillation:
  num_prompts_per_step: 64
  num_generations_per_prompt: 1
  max_rollout_turns: 1
  max_num_steps: 500
  max_num_epochs: 10
  val_period: 20
  max_val_samples: 32
  topk_logits_k: 32
  seed: 9
loss_fn: {kl_type: mixed, mixed_kl_weight: 0.75, zero_outside_topk: false}
policy: &policy
  model_name: some/student
  tokenizer: {name: "${..model_name}"}
  train_global_batch_size: 64
  train_micro_batch_size: 1
  logprob_batch_size: 1
  max_total_sequence_length: 256
  precision: bfloat16
  dtensor_cfg: &dtensor
    {_v2: true, enabled: true, tensor_parallel_size: 2, context_parallel_size: 1}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 2.0e-5}}
  generation:
    backend: vllm
    max_new_tokens: 128
    vllm_cfg: {tensor_parallel_size: 1, max_model_len: "${...max_total_sequence_length}"}
    colocated: {enabled: true}
teacher:
  <<: *policy
  model_name: some/teacher
  dtensor_cfg: {<<: *dtensor, tensor_parallel_size: 4}
data: {train: {dataset_name: DeepScaler}, validation: {dataset_name: AIME2024}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "grpo.yaml").write_text(GRPO)

    def write(text):
        path = tmp_path / "given.yaml"
        path.write_text(text)
        return path

    return write


def fate_of(conversion, key):
    (fate,) = [each for each in conversion.fates if each.key == key]
    return fate


def loaded(conversion, tmp_path):
    """Return the run of the file that is written."""
    assert conversion.problem is None
    path = tmp_path / "ours.yaml"
    path.write_text(conversion.render())
    return load_run_config(conversion.recipe, path=path)


def test_a_grpo_file_is_a_run_that_means_the_same(write, tmp_path):
    config = loaded(convert(write(GRPO)), tmp_path)
    grpo, loss = config.section(GrpoSection), config.section(LossSection)
    assert (grpo.prompts_per_step, grpo.samples_per_prompt, grpo.steps) == (8, 4, 300)
    assert (grpo.leave_one_out, grpo.divide_by_std) == (True, True)
    assert (grpo.eval_every, grpo.eval_at_start) == (20, False)
    assert (loss.kl_coef, loss.clip_low, loss.clip_high) == (0.02, 0.1, 0.3)
    assert (loss.dual_clip, loss.importance_cap) == (None, None)
    assert loss.loss_type == "sequence_level"
    assert (config.checkpoint.every, config.checkpoint.keep_last, config.seed) == (5, 4, 7)
    assert config.cluster.bundle_ct_per_node_list == [4, 4]
    assert config.data.path == "nvidia/OpenMathInstruct-2"
    assert config.data.columns == {"prompt": "problem", "answer": "expected_answer"}
    policy = config.policy
    assert policy["dtensor_cfg"]["tensor_parallel_size"] == 2
    assert policy["sequence_packing"]["train_mb_tokens"] == 512
    assert policy["optimizer"]["kwargs"]["betas"] == [0.9, 0.999]
    assert policy["scheduler"][2] == {"milestones": [50]}
    engine = policy["generation"]["vllm_cfg"]
    assert engine["gpu_memory_utilization"] == 0.6
    assert engine["engine_kwargs"] == {"max_num_batched_tokens": 4096}


def test_every_key_has_a_fate_and_what_is_lost_is_said_in_the_file(write):
    conversion = convert(write(GRPO))

    def leaves(section, path=""):
        for key, value in section.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{path}{key}.")
            else:
                yield f"{path}{key}"

    assert set(leaves(yaml.safe_load(GRPO))) <= {each.key for each in conversion.fates}
    lost = [each for each in conversion.fates if each.is_lost]
    assert {each.key for each in lost} == {
        "env.math.num_workers",
        "grpo.max_num_epochs",
        "policy.generation.max_new_tokens",
    }
    for each in lost:
        assert f"# {each}\n" in conversion.render()
    assert fate_of(conversion, "grpo.max_num_steps").text == "-> grpo.steps"
    assert fate_of(conversion, "policy.precision").text == "kept"


def test_defaults_of_another_file_and_megatron(write, tmp_path):
    conversion = convert(write(MEGATRON))
    config = loaded(conversion, tmp_path)
    megatron = config.policy["megatron_cfg"]
    assert megatron["enabled"]
    assert not config.policy["dtensor_cfg"]["enabled"]
    assert megatron["pipeline_model_parallel_size"] == 2
    assert megatron["optimizer"]["clip_grad"] == 1.0
    assert (megatron["moe_router_dtype"], megatron["env_vars"]) == ("fp64", {"NCCL_DEBUG": "WARN"})
    assert config.policy["make_sequence_length_divisible_by"] == 2
    assert config.section(GrpoSection).steps == 300
    # What is switched off is not lost.
    assert not fate_of(conversion, "policy.megatron_cfg.peft.dim").is_lost


def test_a_correction_and_trackers(write, tmp_path):
    switch, bound = "importance_sampling_correction", "truncated_importance_sampling_ratio: 3.0"
    text = GRPO.replace("token_level_loss:", f"{bound}\n  token_level_loss:")
    # A bound of a correction that is off bounds nothing.
    assert loaded(convert(write(text)), tmp_path).section(LossSection).importance_cap is None
    text = text.replace(f"{switch}: false", f"{switch}: true")
    text = text.replace("wandb_enabled: false", "wandb_enabled: true")
    config = loaded(convert(write(text)), tmp_path)
    assert config.section(LossSection).importance_cap == 3.0
    assert config.logger == ["wandb"]


def test_ratios_of_sequences_and_clamps(write, tmp_path):
    more = "sequence_level_importance_ratios: true\n  kl_input_clamp_value: 20.0\n"
    text = GRPO.replace(
        "token_level_loss:", f"{more}  kl_output_clamp_value: 10.0\n  token_level_loss:"
    )
    loss = loaded(convert(write(text)), tmp_path).section(LossSection)
    assert (loss.ratio_level, loss.loss_type) == ("sequence", "sequence_level")
    assert (loss.kl_log_ratio_clamp, loss.kl_clamp) == (20.0, 10.0)


def test_fine_tuning(write, tmp_path):
    config = loaded(convert(write(SFT)), tmp_path)
    assert config.section(SftSection).steps == 60
    # A period of 0 is never.
    assert config.section(SftSection).eval_every > 60
    assert (config.data.path, config.data.heldout_path) == ("train.jsonl", "val.jsonl")
    assert config.data.columns == {"prompt": "question"}


def test_preferences(write, tmp_path):
    conversion = convert(write(DPO))
    config = loaded(conversion, tmp_path)
    assert (config.section(DpoSection).beta, config.section(DpoSection).steps) == (0.05, 150)
    lost = {each.key for each in conversion.fates if each.is_lost}
    assert lost == {"dpo.sft_loss_weight", "dpo.max_num_epochs", "data"}


def test_a_batch_of_pairs_is_one_of_twice_the_rows(write, tmp_path):
    # Micro-batches of one pair, which are the rule there.
    for text in (DPO, REWARD_MODEL):
        conversion = convert(write(text.replace("micro_batch_size: 2", "micro_batch_size: 1")))
        policy = loaded(conversion, tmp_path).policy
        assert (policy["train_global_batch_size"], policy["train_micro_batch_size"]) == (64, 2)
        assert "64 rows" in fate_of(conversion, "policy.train_global_batch_size").text


def test_the_newer_name_of_the_dtensor_section(write, tmp_path):
    text = GRPO.replace("dtensor_cfg", "automodel_cfg")
    conversion = convert(write(text))
    assert loaded(conversion, tmp_path).policy["dtensor_cfg"]["tensor_parallel_size"] == 2
    assert "-> policy.dtensor_cfg" in fate_of(conversion, "policy.automodel_cfg").text
    # A file in the newer name over one in the older.
    newer = MEGATRON.replace("dtensor_cfg: {enabled: false}", "automodel_cfg: {enabled: false}")
    policy = loaded(convert(write(newer)), tmp_path).policy
    assert (policy["dtensor_cfg"]["enabled"], policy["megatron_cfg"]["enabled"]) == (False, True)
    teacher = DISTILLATION.replace("dtensor_cfg", "automodel_cfg")
    config = loaded(convert(write(teacher)), tmp_path)
    assert teacher_policy(config)["dtensor_cfg"]["tensor_parallel_size"] == 4


@pytest.mark.parametrize("section", ["sequence_packing", "dynamic_batching"])
def test_tokens_of_a_scored_micro_batch_that_is_not_named(write, tmp_path, section):
    given = f"{section}: {{enabled: true, train_mb_tokens: 512, sequence_length_round: 64}}"
    text = SFT.replace("optimizer:", f"{given}\n  optimizer:")
    conversion = convert(write(text))
    assert loaded(conversion, tmp_path).policy[section]["logprob_mb_tokens"] == 512
    key = f"policy.{section}.logprob_mb_tokens"
    assert fate_of(conversion, key).text.endswith("train_mb_tokens=512")


def test_a_file_replaces_sections_of_its_defaults(write, tmp_path):
    replaced = "data: {_override_: true, train: [{data_path: a.jsonl}], validation: null}"
    conversion = convert(write(f"defaults: grpo.yaml\n{replaced}\n"))
    config = loaded(conversion, tmp_path)
    assert config.data.path == "a.jsonl"
    assert config.data.columns == {}
    assert not [each for each in conversion.fates if each.key == "data.dataset_name"]
    two = replaced.replace("}]", "}, {data_path: c.jsonl}]")
    fates = convert(write(f"defaults: grpo.yaml\n{two}\n")).fates
    (lost,) = [each for each in fates if each.key == "data.train" and each.is_lost]
    assert "the first of 2 datasets" in lost.text
    # A section over a list, without the mark.
    (tmp_path / "base.yaml").write_text(f"defaults: grpo.yaml\n{replaced}\n")
    text = "defaults: base.yaml\ndata: {train: {data_path: b.jsonl}}\n"
    assert loaded(convert(write(text)), tmp_path).data.path == "b.jsonl"


def test_what_is_switched_off_is_not_lost(write):
    shaping = "reward_shaping: {enabled: false, overlong_buffer_length: 128, inner: {a: 7}}"
    text = GRPO.replace("  seed: 7", f"  seed: 7\n  {shaping}")
    text = text.replace("use_deep_gemm: false", "kv_cache_dtype: auto")
    keys = ("overlong_buffer_length", "inner.a")
    off = convert(write(text))
    assert not any(fate_of(off, f"grpo.reward_shaping.{key}").is_lost for key in keys)
    assert not fate_of(off, "policy.generation.vllm_cfg.kv_cache_dtype").is_lost
    text = text.replace("{enabled: false, overlong", "{enabled: true, overlong")
    on = convert(write(text.replace("kv_cache_dtype: auto", "kv_cache_dtype: fp8")))
    assert all(fate_of(on, f"grpo.reward_shaping.{key}").is_lost for key in keys)
    assert fate_of(on, "policy.generation.vllm_cfg.kv_cache_dtype").is_lost


def test_reward_models(write, tmp_path):
    conversion = convert(write(REWARD_MODEL))
    config = loaded(conversion, tmp_path)
    assert (conversion.recipe, config.policy["head"], config.seed) == ("rm", "reward", 3)
    assert config.section(RmSection).eval_every == 16
    assert config.data.path == "pairs.jsonl"
    assert config.data.heldout_path == ["heldout.jsonl", "more.jsonl"]
    assert config.data.columns == {"prompt": "question", "chosen": "better", "rejected": "worse"}
    # All epochs there, and no number of steps.
    assert "set rm.steps" in fate_of(conversion, "rm.max_num_steps").text
    lost = {each.key for each in conversion.fates if each.is_lost}
    assert lost == {"rm.max_num_steps", "rm.max_num_epochs"}


def test_distillation(write, tmp_path):
    conversion = convert(write(DISTILLATION))
    config = loaded(conversion, tmp_path)
    distill = config.section(DistillSection)
    assert (distill.teacher, distill.steps, distill.eval_every) == ("some/teacher", 500, 20)
    assert (distill.top_k, distill.beta, distill.truncate_student) == (32, 0.25, True)
    assert distill.teacher_policy == {"dtensor_cfg": {"tensor_parallel_size": 4}}
    assert teacher_policy(config)["dtensor_cfg"]["tensor_parallel_size"] == 4
    assert (config.data.num_heldout, config.seed) == (32, 9)
    lost = {each.key for each in conversion.fates if each.is_lost}
    assert lost == {"distillation.max_num_epochs", "loss_fn.kl_type"}


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0)])
def test_one_divergence_of_a_distillation_is_not_lost(write, tmp_path, kind, beta):
    text = DISTILLATION.replace("kl_type: mixed", f"kl_type: {kind}")
    conversion = convert(write(text.replace("per_step: 64", "per_step: 128")))
    assert loaded(conversion, tmp_path).section(DistillSection).beta == beta
    assert not fate_of(conversion, "loss_fn.kl_type").is_lost
    steps = fate_of(conversion, "distillation.num_prompts_per_step")
    assert "of policy.train_global_batch_size=64" in steps.text


def test_asynchronous_rollouts(write, tmp_path):
    text = GRPO.replace("{enabled: false, max_trajectory_age", "{enabled: true, max_trajectory_age")
    text = text.replace("train_global_batch_size: 32", "train_global_batch_size: 16")
    apart = "colocated: {enabled: false, resources: {gpus_per_node: 4, num_nodes: 1}}"
    text = text.replace(
        "colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}", apart
    )
    conversion = convert(write(text))
    # A step of 32 samples is two optimizer steps.
    assert loaded(conversion, tmp_path).section(AsyncSection).max_staleness == 2
    assert not fate_of(conversion, "grpo.async_grpo.enabled").is_lost


NOT_HERE = [
    ("max_rollout_turns: 1", "max_rollout_turns: 4", "grpo.max_rollout_turns", "one turn"),
    ("{enabled: false, max_tra", "{enabled: true, max_tra", "grpo.async_grpo.enabled", "synchr"),
    ("backend: vllm", "backend: sglang", "policy.generation.backend", "'vllm' takes its place"),
    (
        "precision: ${policy.precision}",
        "precision: fp8",
        "policy.generation.vllm_cfg.precision",
        "not in 'fp8'",
    ),
    (
        "use_deep_gemm: false",
        "use_deep_gemm: true",
        "policy.generation.vllm_cfg.use_deep_gemm",
        "engine_kwargs",
    ),
    ("logprob_chunk_size: null", "logprob_chunk_size: 9", "policy.logprob_chunk_size", "nothing"),
    (
        "use_importance_sampling_correction: false",
        "use_importance_sampling_correction: true",
        "loss_fn.use_importance_sampling_correction",
        "truncated",
    ),
    ("prompt_file: null", "prompt_file: p.txt", "data.prompt_file", "a prompt is what the data"),
]


@pytest.mark.parametrize(("old", "new", "key", "text"), NOT_HERE)
def test_what_is_not_here_is_marked_and_the_rest_is_a_run(write, tmp_path, old, new, key, text):
    assert old in GRPO
    conversion = convert(write(GRPO.replace(old, new)))
    fates = [each for each in conversion.fates if each.key == key and each.is_lost]
    assert text in fates[-1].text
    assert loaded(conversion, tmp_path)


def test_lora_and_engines_apart(write, tmp_path):
    text = GRPO.replace("lora_cfg: {enabled: false", "lora_cfg: {enabled: true")
    text = text.replace(
        "colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}",
        "colocated: {enabled: false, resources: {gpus_per_node: 4, num_nodes: 1}}",
    )
    config = loaded(convert(write(text)), tmp_path)
    lora = config.policy["dtensor_cfg"]["lora"]
    assert (lora["enabled"], lora["r"], lora["lora_alpha"]) == (True, 8, 32)
    # There the engines' node is one of the cluster's two, here it is beside them.
    assert config.cluster.bundle_ct_per_node_list == [4]
    assert config.engine_bundles == [4]


def test_overrides_mend_what_is_no_run(write):
    path = write(GRPO.replace("train_global_batch_size: 32", "train_global_batch_size: 33"))
    assert "train_global_batch_size=33 does not divide the 32 samples" in convert(path).problem
    assert convert(path, ["policy.train_global_batch_size=16"]).problem is None


def test_the_command_writes_a_file_or_says_what_is_wrong(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return CliRunner().invoke(build_app(), list(map(str, arguments)))

    path = write(GRPO)
    done = run("convert-config", path, "--out", "ours.yaml")
    assert done.exit_code == 0, done.stderr
    assert "grpo.max_num_steps: -> grpo.steps" in done.stderr
    assert "prompts_per_step: 8" in run("grpo", "--config", "ours.yaml", "--show-config").stdout
    again = run("convert-config", path, "--out", "ours.yaml")
    assert (again.exit_code, again.stderr) == (
        2,
        "error: --out ours.yaml exists, and is not overwritten\n",
    )
    for text, message in [
        ("asft: {}\npolicy: {}\n", "none of the sections grpo, sft, dpo, rm, distillation alone"),
        ("defaults: absent.yaml\n", "cannot read"),
        ("defaults: given.yaml\n", "its defaults name itself"),
        ("grpo: {a: '${nothing.there}'}\n", "cannot read"),
        ("grpo: {max_num_steps: 3}\n", "has no section policy"),
        ("- 1\n", "must hold a mapping"),
        ("grpo: [\n", "cannot read"),
    ]:
        refused = run("convert-config", write(text))
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert message in refused.stderr
    wrong = write(GRPO.replace("num_prompts_per_step: 8", "num_prompts_per_step: 7"))
    broken = run("convert-config", wrong)
    assert broken.exit_code == 2
    assert "does not divide the 28 samples" in broken.stderr
