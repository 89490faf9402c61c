"""Every causal language model of transformers, tiny and random, in every layout of the workers.

`nox -s zoo` holds each against transformers itself and writes `docs/pages/models.md`.
"""
