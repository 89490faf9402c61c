"""The contracts of an LLM post-training policy. Importing this loads neither torch nor ray."""

from rl_interfaces.cluster import Cluster
from rl_interfaces.config.resolve import (
    GENERATION_DEFAULTS,
    POLICY_DEFAULTS,
    resolve_policy_config,
)
from rl_interfaces.config.schema import check_typed_dict
from rl_interfaces.config.types import (
    DTensorConfig,
    DynamicBatchingConfig,
    LoraConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    PolicyConfig,
    PytorchOptimizerConfig,
    SchedulerMilestones,
    SequencePackingConfig,
    SinglePytorchSchedulerConfig,
    TokenizerConfig,
)
from rl_interfaces.contract import (
    CONTRACT_VERSION,
    ContractVersionError,
    check_contract_version,
)
from rl_interfaces.generation import (
    ColocationConfig,
    ColocationResources,
    GenerationConfig,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
)
from rl_interfaces.loss import LossFunction, LossInput, LossType
from rl_interfaces.policy import (
    ColocatablePolicyInterface,
    LogprobOutputSpec,
    PolicyInterface,
    ReferenceLogprobOutputSpec,
    ScoreOutputSpec,
    TopkLogitsOutputSpec,
)
from rl_interfaces.residency import Residency, ResidencyError, ResidencyState
from rl_interfaces.weights import TensorSpec, WeightReceiver, WeightSource
from rl_interfaces.worker import (
    AdapterSavingWorker,
    ParallelLayout,
    PolicyWorker,
    RowScoringWorker,
    TopkLogitsWorker,
    WeightSendingWorker,
)

__all__ = [
    "CONTRACT_VERSION",
    "GENERATION_DEFAULTS",
    "POLICY_DEFAULTS",
    "AdapterSavingWorker",
    "Cluster",
    "ColocatablePolicyInterface",
    "ColocationConfig",
    "ColocationResources",
    "ContractVersionError",
    "DTensorConfig",
    "DynamicBatchingConfig",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "LogprobOutputSpec",
    "LoraConfig",
    "LossFunction",
    "LossInput",
    "LossType",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronOptimizerConfig",
    "MegatronSchedulerConfig",
    "ParallelLayout",
    "PolicyConfig",
    "PolicyInterface",
    "PolicyWorker",
    "PytorchOptimizerConfig",
    "ReferenceLogprobOutputSpec",
    "Residency",
    "ResidencyError",
    "ResidencyState",
    "RowScoringWorker",
    "SchedulerMilestones",
    "ScoreOutputSpec",
    "SequencePackingConfig",
    "SinglePytorchSchedulerConfig",
    "TensorSpec",
    "TokenizerConfig",
    "TopkLogitsOutputSpec",
    "TopkLogitsWorker",
    "WeightReceiver",
    "WeightSendingWorker",
    "WeightSource",
    "check_contract_version",
    "check_typed_dict",
    "resolve_policy_config",
]
