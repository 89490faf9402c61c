import doctest
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```pycon\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_an_example_of_the_readme_prints_what_it_says(block):
    names: dict[str, object] = {}
    for index, text in enumerate(BLOCKS[: block + 1]):
        examples = doctest.DocTestParser().get_doctest(text, names, f"block {index}", None, 0)
        report: list[str] = []
        results = doctest.DocTestRunner().run(examples, out=report.append, clear_globs=False)
        assert results.failed == 0, "".join(report)
        names = examples.globs


def test_the_readme_has_examples():
    assert len(BLOCKS) == 3
