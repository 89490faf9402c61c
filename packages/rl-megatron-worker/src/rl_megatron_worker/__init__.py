"""A policy worker on Megatron-core: tensor, pipeline, context and expert parallelism."""
