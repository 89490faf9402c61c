"""Model FLOPs of training, and the share of a device's peak that they are (MFU).

The count is that of Kaplan et al. (2020) with the attention of PaLM (Chowdhery et al. 2022,
appendix B). For a row of `s` tokens,

    forward FLOPs = 2 * N * s + 4 * A * s^2
    training FLOPs = 3 * forward FLOPs

where `N` are the parameters that multiply a token: all but the input embedding, which is looked up,
and of a mixture of experts the chosen ones. `A` is the sum over layers of heads * head size. The
causal mask is not taken off, as PaLM does not; recomputed activations and padding do not count.
With adapters (LoRA) the frozen weights get no gradient of their own: 2 * forward FLOPs.

MFU is the FLOPs of the optimizer steps of a step, over their seconds, the devices of the policy,
and the dense peak of a device in 16 bits. It is None in other precisions and on devices without an
entry in `PEAK_TFLOPS`, CPUs among them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from rl_interfaces.backend.checkpoint.hf_files import load_model_config
from transformers import PreTrainedConfig

from rl_policy.config import RunConfig, Settings

_LOGGER = logging.getLogger(__name__)

PEAK_TFLOPS = {
    # Dense, in bfloat16 or float16, from the makers' data sheets. The first name that the device's
    # contains counts.
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "H800": 989.4,
    "H20": 148.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX A6000": 154.8,
    "RTX 4090": 165.2,
    "V100": 125.0,
    "T4": 65.0,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}
"""Peaks by a part of the device's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What the FLOPs of a model follow from.

    Attributes:
        num_parameters: Parameters that multiply a token, `N` above.
        attention_width: Sum over layers of heads * head size, `A` above.
    """

    num_parameters: float
    attention_width: int

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> ModelSize:
        """Return the size of a language model; it is built without memory.

        Example, the built-in model of 2 layers, width 64, MLPs of 256, 258 tokens:
            num_parameters  = 2 * (4 * 64^2 + 3 * 64 + 3 * 64 * 256 + 2 * 64) + 64 + 258 * 64
            attention_width = 2 * 64
        """
        # Here, as it imports the code of models, which takes a second.
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        share = _active_share(text)
        total = sum(
            parameter.numel() * (share if ".experts." in name else 1.0)
            for name, parameter in model.named_parameters()
        )
        if not _is_tied(model):
            total -= model.get_input_embeddings().weight.numel()
        num_heads = getattr(text, "num_attention_heads", 0)
        head_size = getattr(text, "head_dim", None) or text.hidden_size // max(1, num_heads)
        return cls(
            num_parameters=total, attention_width=text.num_hidden_layers * num_heads * head_size
        )

    def forward_flops(self, lengths: torch.Tensor) -> float:
        """Return the FLOPs of a forward pass over rows of these lengths, `[batch]`."""
        tokens = lengths.double()
        linear = 2 * self.num_parameters * float(tokens.sum())
        return linear + 4 * self.attention_width * float((tokens**2).sum())


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOPs per second of a device; None if no peak is known.

    Args:
        device_name: As the driver names it, "NVIDIA H100 80GB HBM3" say.
        precision: `policy.precision`.
    """
    if precision not in ("bfloat16", "float16"):
        return None
    found = [peak for name, peak in PEAK_TFLOPS.items() if name in device_name]
    return found[0] * 1e12 if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """Measures how well a run uses its devices.

    Attributes:
        size: Of the model; None if it cannot be counted.
        passes: Training FLOPs over forward FLOPs.
        num_policy_devices: Ranks that train.
        num_devices: These and the engines' own.
        peak: FLOPs per second of a device; None if it is not known.
    """

    size: ModelSize | None
    passes: float
    num_policy_devices: int
    num_devices: int
    peak: float | None

    @classmethod
    def of_run(cls, config: RunConfig, *, model: str) -> DeviceSpeed:
        """Return the measure of a run that starts from a model.

        Args:
            config: Of the run.
            model: Name or directory of the model.
        """
        num_policy = sum(config.cluster.bundle_ct_per_node_list)
        has_own = config.has_engines and not config.is_colocated
        return cls(
            size=_size_or_none(config.policy, model),
            passes=2.0 if config.policy["dtensor_cfg"]["lora"]["enabled"] else 3.0,
            num_policy_devices=num_policy,
            num_devices=num_policy + (sum(config.engine_bundles) if has_own else 0),
            peak=_peak(config),
        )

    def measure(
        self, lengths: torch.Tensor, *, step_s: float, train_s: float, num_epochs: int
    ) -> dict[str, float | None]:
        """Return the columns of a step that say how fast it was.

        Args:
            lengths: Tokens of each row, `[batch]`.
            step_s: Seconds of the step.
            train_s: Seconds of its optimizer steps.
            num_epochs: Times that each row was trained on.
        """
        tokens_per_s = int(lengths.sum()) / step_s
        achieved = None
        if self.size is not None:
            flops = self.passes * num_epochs * self.size.forward_flops(lengths)
            achieved = flops / train_s / self.num_policy_devices
        mfu = None
        if achieved is not None and self.peak is not None:
            mfu = achieved / self.peak
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / self.num_devices,
            "tflops_per_s_per_device": None if achieved is None else achieved / 1e12,
            "mfu": mfu,
        }


def _size_or_none(policy: Settings, model: str) -> ModelSize | None:
    try:
        config = load_model_config(model, trust_remote_code=policy["trust_remote_code"])
        return ModelSize.of_config(config)
    except (
        Exception
    ) as error:  # a model's own code may raise anything, and training does not need it
        _LOGGER.warning("FLOPs and MFU are not measured, as %s cannot be counted: %s", model, error)
        return None


def _active_share(text: PreTrainedConfig) -> float:
    """Return the share of a layer's experts that a token is sent to."""
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    num_experts = next((value for name in names if (value := getattr(text, name, None))), None)
    if not isinstance(chosen, int) or not isinstance(num_experts, int):
        return 1.0
    return chosen / num_experts


def _is_tied(model: torch.nn.Module) -> bool:
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue] # a PreTrainedModel
    embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue] # as above
    return head is None or head.weight is embedding.weight


def _peak(config: RunConfig) -> float | None:
    """Return the peak of the driver's device, which stands for those of the ranks."""
    if config.cluster.use_gpus is False or not torch.cuda.is_available():
        return None
    return peak_flops(torch.cuda.get_device_name(0), config.policy["precision"])
