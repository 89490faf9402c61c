"""What backends on torch have in common: ranks, devices, random state, files of checkpoints.

The contracts import nothing of it. It needs `rl-interfaces[backend]`: torch, safetensors and
transformers.
"""
