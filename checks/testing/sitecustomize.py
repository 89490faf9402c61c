"""Imported by each Python process that a test starts, as this folder is on its `PYTHONPATH`."""

import stacks

stacks.register()
