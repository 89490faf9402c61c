"""What runs in an engine's process, and in vLLM's own workers. Importing this imports nothing.

`start` constructs a rank's `vllm_engine`. Its calls take `turns` in one thread: those of `running`,
the requests that it steps for, and of `updates`, the weights, by `rl_refit` or `worker_calls`.
"""
