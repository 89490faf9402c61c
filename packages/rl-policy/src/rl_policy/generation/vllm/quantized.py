"""Which tensors engines hold in 8 bits, so that a trainer sends them so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rl_interfaces.backend.checkpoint.hf_files import (
    SafetensorsFiles,
    find_checkpoint,
    load_model_config,
)
from rl_refit.block_fp8 import BLOCK, SCALES

if TYPE_CHECKING:
    from collections.abc import Mapping


def block_fp8_tensors(model_name: str, *, trust_remote_code: bool) -> list[str]:
    """Return the tensors that a model's checkpoint has in block-FP8, in order.

    An engine that loads the checkpoint holds these in 8 bits, see `rl_refit.block_fp8`, and takes
    new weights no other way.

    Args:
        model_name: Name or directory of the model.
        trust_remote_code: Whether code that comes with the model may run.

    Returns:
        Their names; none, if the checkpoint is in full precision.

    Raises:
        ValueError: The model cannot be read, or is quantised in another format.
    """
    config = load_model_config(model_name, trust_remote_code=trust_remote_code)
    found: Any = getattr(config, "quantization_config", None)
    if found is None:
        return []
    quantization = cast("Mapping[str, Any]", found if isinstance(found, dict) else found.to_dict())
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    names = set(SafetensorsFiles(find_checkpoint(model_name, config)).names)
    tensors = sorted(name for name in names if name + SCALES in names)
    if method != "fp8" or list(block or ()) != [BLOCK, BLOCK] or not tensors:
        raise ValueError(
            f"policy.model_name={model_name!r} is quantised (quant_method={method!r}, "
            f"weight_block_size={block}): of such checkpoints, engines can be sent the weights of "
            f"those in block-FP8 (quant_method='fp8', weight_block_size=[{BLOCK}, {BLOCK}]). Give "
            "one of these, or a checkpoint in full precision"
        )
    return tensors
