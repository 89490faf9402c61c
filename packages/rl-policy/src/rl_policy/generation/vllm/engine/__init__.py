"""What runs in an engine's process, and in vLLM's own workers. Importing this imports nothing.

start --> vllm_engine --turns--> running   the requests that it steps for
--turns--> updates   the weights, by `rl_refit` or `worker_calls`
"""
