"""The kit by itself; `test_transport_rules` has pairs that break its rules."""

import subprocess
import sys
from unittest import SkipTest

import pytest
from patience import PATIENCE_S
from rl_refit import RefitSender, TensorSource
from rl_refit.testing import (
    RULES,
    TransportConformance,
    check_rule,
    check_transport,
    receiver_in_thread,
    rule_names,
)
from rl_refit.testing.pair import require_same, some_tensors

pytestmark = pytest.mark.needs("rl-refit[testing]")


class NoPair:
    """Lacks all that the rules ask for."""

    is_for_processes = False


def test_the_suite_is_imported_without_pytest():
    code = "import sys; import rl_refit.testing; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_rule_has_a_name_of_its_own_and_says_what_it_means():
    assert all(rule.__doc__ for rules in RULES.values() for rule in rules)
    assert len(set(rule_names())) == len(rule_names()) == 40


def test_the_report_names_every_broken_rule_and_why():
    with pytest.raises(AssertionError) as caught:
        check_transport(NoPair())
    first, *lines = str(caught.value).splitlines()
    assert first == "the transport does not conform:"
    kept = rule_names(group for group in RULES if group != "kills")
    assert [line.partition(":")[0] for line in lines] == kept
    assert all("AttributeError" in line for line in lines)


def test_what_a_pair_lacks_is_skipped_by_name():
    with pytest.raises(SkipTest, match="is_for_processes is false"):
        check_rule("receivers_survive_a_killed_sender", NoPair())
    skipped = check_transport(NoPair(), groups=["kills"])
    assert [line.partition(":")[0] for line in skipped] == rule_names(["kills"])


class TestSkips(TransportConformance):
    """That the suite makes a test of each rule of its groups, and skips what does not apply."""

    pair = NoPair()
    groups = ("kills",)

    @pytest.fixture(autouse=True)
    def lacks(self, rule):
        with pytest.raises(SkipTest):
            check_rule(rule, self.pair)


def test_rules_that_python_leaves_out_are_not_said_to_hold():
    code = (
        "from rl_refit import testing as kit\n"
        "try: kit.check_rule(kit.rule_names()[0], None)\n"
        "except RuntimeError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-O", "-c", code], check=True, stdout=subprocess.PIPE)
    assert b"python -O removes the assertions" in run.stdout


def test_a_trainers_test_gets_its_other_end_in_a_thread():
    tensors = some_tensors()
    with (
        RefitSender(TensorSource(tensors), bucket_bytes=1024, timeout_s=PATIENCE_S) as sender,
        receiver_in_thread(sender.address, send=sender.send, timeout_s=PATIENCE_S) as refit,
    ):
        for version in (1, 2):
            for tensor in tensors.values():
                tensor += 1
            require_same(refit(version), tensors, "the receiver")
