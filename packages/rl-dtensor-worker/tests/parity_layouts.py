"""The layouts of the parity table: ranks, and the keys of `policy.dtensor_cfg`."""

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2_tp2": (4, {"tensor_parallel_size": 2}),
    "dp2_cp2": (4, {"context_parallel_size": 2}),
    "tp2_cp2": (4, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
    "hybrid": (4, {"data_parallel_replicate_size": 2}),
    "replicated": (2, {"data_parallel_replicate_size": "auto"}),
    "replicated_cp2": (4, {"context_parallel_size": 2, "data_parallel_replicate_size": "auto"}),
}
