"""The kit for transports by itself: rl-refit has the transports, and pairs that break its rules."""

import subprocess
import sys
from importlib import import_module
from unittest import SkipTest

import pytest
from rl_interfaces.testing.transports import (
    RULES,
    TransportConformance,
    check_rule,
    check_transport,
    rule_names,
)

pytestmark = pytest.mark.needs("rl-interfaces[testing]")


class NoPair:
    """Lacks all that the rules ask for."""

    is_for_processes = False


def test_the_suite_is_imported_without_torch_and_pytest():
    code = (
        "import sys; import rl_interfaces.testing.transports;"
        "assert not {'torch', 'pytest', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_rule_is_a_function_of_its_module_that_says_what_it_means():
    for group, names in RULES.items():
        module = import_module(f"rl_interfaces.testing.transports_{group}")
        assert all(getattr(module, name).__doc__ for name in names)
        public = [name for name in vars(module) if name in rule_names()]
        assert sorted(public) == sorted(names)
    assert len(set(rule_names())) == len(rule_names()) == 28


def test_the_report_names_every_broken_rule_and_why():
    with pytest.raises(AssertionError) as caught:
        check_transport(NoPair())
    first, *lines = str(caught.value).splitlines()
    assert first == "the transport does not conform:"
    kept = [name for group, names in RULES.items() if group != "kills" for name in names]
    assert [line.partition(":")[0] for line in lines] == kept
    assert all("AttributeError" in line for line in lines)


def test_what_a_pair_lacks_is_skipped_by_name():
    with pytest.raises(SkipTest, match="is_for_processes is false"):
        check_rule("a_killed_sender_takes_nobody_along", NoPair())
    skipped = check_transport(NoPair(), groups=["kills"])
    assert [line.partition(":")[0] for line in skipped] == list(RULES["kills"])


class TestSkips(TransportConformance):
    """That the suite makes a test of each rule of its groups, and skips what there is not."""

    pair = NoPair()
    groups = ("kills",)

    @pytest.fixture(autouse=True)
    def lacks(self, rule):
        with pytest.raises(SkipTest):
            check_rule(rule, self.pair)
