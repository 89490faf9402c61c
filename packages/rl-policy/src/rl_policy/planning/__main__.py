"""The process of `plan_memory`: `python -m rl_policy.planning RESULT < request`."""

import gc


def _main() -> None:
    # What is imported makes a million objects that stay, which the collector would go through
    # again and again: it is a tenth of the plan's time.
    gc.disable()
    from rl_policy.planning.process import main

    gc.freeze()
    gc.enable()
    main()


if __name__ == "__main__":
    _main()
