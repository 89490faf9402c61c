import inspect
import textwrap

import pytest
from rl_interfaces import Environment, EnvironmentStep

pytestmark = pytest.mark.promise


def test_the_example_of_the_protocol_does_what_it_says():
    _, _, example = inspect.getdoc(Environment).partition('step("6")')
    names = {"EnvironmentStep": EnvironmentStep}
    exec(textwrap.dedent(example.partition("\n\n")[2]), names)
    game = names["Guess"]()
    assert isinstance(game, Environment)

    class Row:
        answer = "6"

    assert game.reset(Row()) == "A number from 1 to 9?"
    assert game.step("4") == EnvironmentStep("higher", 0.0, done=False)
    assert game.step("9") == ("lower", 0.0, False)
    assert game.step("6") == EnvironmentStep("", 1.0, done=True)
    assert game.step("six").reward == -1.0


@pytest.mark.parametrize("method", ["reset", "step"])
def test_what_lacks_a_method_is_none(method):
    class Partial:
        pass

    setattr(Partial, method, lambda self, given: None)
    assert not isinstance(Partial(), Environment)
