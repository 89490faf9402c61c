import pytest
from rl_interfaces.backend.checkpoint.hf_files import find_checkpoint
from transformers import PreTrainedConfig

pytestmark = [pytest.mark.promise, pytest.mark.needs("rl-interfaces[backend]")]


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"policy\.model_name=.* has no weights: .*no file named"):
        find_checkpoint(str(tmp_path), PreTrainedConfig())
