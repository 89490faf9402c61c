"""The layouts of the parity table, and what results of ranks are held against."""

import torch
from plain_loop import load
from tiny_models import PAD
from tolerances import assert_close

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {TP: 2}),
    "tp2_sp": (2, {TP: 2, "sequence_parallel": True}),
    "pp2": (2, {PP: 2}),
    "pp2_unlike": (2, {PP: 2, "num_layers_in_first_pipeline_stage": 1}),
    "pp2_virtual": (2, {PP: 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "tp2_pp2": (4, {TP: 2, PP: 2}),
    "dp2_tp2": (4, {TP: 2}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
}


def num_layers_of(layout):
    """Return the fewest layers that show a layout: stages of unlike size, or several of a rank."""
    return 4 if layout in ("pp2_unlike", "pp2_virtual") else 2


def joined(results, key):
    """Return the rows of all data-parallel places, in the batch's order."""
    places = {result["place"]: result for result in results}
    rows = torch.cat([places[place][key] for place in sorted(places)])
    order = places[0]["order"]
    if order is None:
        return rows
    restored = torch.empty_like(rows)
    restored[torch.tensor(order)] = rows
    return restored


def assert_equal_parameters(found, state, tolerance):
    """Hold tensors under the names of a file against those of a model."""
    for name, tensor in found.items():
        difference = float((tensor - in_memory(state, name)).abs().max())
        assert difference <= tolerance, (name, difference)


def assert_parameters(found, expected, *, times=1.0):
    """Hold tensors under the names of a file against what plain training gives."""
    for name, tensor in found.items():
        assert_close(tensor, in_memory(expected, name), name, times=times)


# How Mixtral's files name what transformers names as in Qwen's.
_OF_MIXTRAL = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


def in_memory(state, name):
    """Return what a model of transformers has of a tensor that a file has; experts are fused."""
    for in_files, ours in _OF_MIXTRAL.items():
        name = name.replace(in_files, ours)
    if name in state:
        return state[name]
    layer, _, rest = name.partition(".experts.")
    expert, projection, _ = rest.split(".")
    if projection == "down_proj":
        return state[f"{layer}.experts.down_proj"][int(expert)]
    both = state[f"{layer}.experts.gate_up_proj"][int(expert)]
    half = len(both) // 2
    return both[:half] if projection == "gate_proj" else both[half:]


def assert_greedy_is_that_of_transformers(results, batch, model):
    plain = load(model)
    for result in results:
        shards = batch.shard_by_batch_size(
            len({each["place"] for each in results}), allow_uneven_shards=True
        )
        rows = shards[result["place"]]
        for row, length in enumerate(rows["input_lengths"].tolist()):
            expected = plain.generate(
                rows["input_ids"][row : row + 1, :length], do_sample=False, max_new_tokens=8
            )[0]
            total = int(result["unpadded_sequence_lengths"][row])
            assert result["output_ids"][row, :total].tolist() == expected.tolist()
            assert torch.all(result["output_ids"][row, total:] == PAD)
