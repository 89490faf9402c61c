import subprocess
import sys

import pytest
import rl_dtensor_worker
from patience import PATIENCE_S
from rl_dtensor_worker.parallel import fsdp


def test_every_public_name_is_there():
    assert rl_dtensor_worker.get_cpu_state_dict is fsdp.get_cpu_state_dict
    assert rl_dtensor_worker.unshard_fsdp2_model is fsdp.unshard_fsdp2_model
    for name in rl_dtensor_worker.__all__:
        assert callable(getattr(rl_dtensor_worker, name))
    with pytest.raises(AttributeError, match="no attribute 'shard_model'"):
        _ = rl_dtensor_worker.shard_model


def test_the_class_of_the_worker_is_imported_without_its_engine():
    code = """
import sys
from rl_dtensor_worker import DTensorPolicyWorker
before = "rl_dtensor_worker.engine" in sys.modules or "torch.distributed.fsdp" in sys.modules
print(before, DTensorPolicyWorker.find_engine().__name__)
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert found.stdout.split() == ["False", "DTensorEngine"], found.stderr
