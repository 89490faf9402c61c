"""The policy's processes on Ray: a cluster's bundles, an actor per rank, and calls to all of them.

Workers are plain classes: nothing outside this folder and `rl_policy.generation.vllm` knows Ray.
"""
