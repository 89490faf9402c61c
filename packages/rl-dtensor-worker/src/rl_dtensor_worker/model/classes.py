"""Which of transformers' classes a checkpoint is loaded as."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

_BY_HEAD: dict[str, Any] = {
    "reward": AutoModelForSequenceClassification,
    "value": AutoModelForTokenClassification,
}


def auto_class(head: str, model_config: Any) -> Any:
    """Return the `AutoModel...` class for a head and the architecture that a config names.

    Args:
        head: `policy.head`.
        model_config: The model's transformers config.
    """
    if head in _BY_HEAD:
        return _BY_HEAD[head]
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_config.model_type)
    if with_images in (model_config.architectures or ()):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM
