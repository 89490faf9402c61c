import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from patience import PATIENCE_S

from checks import apart, probe
from checks.workspace import PROJECTS, extras, import_name

REQUEST = {
    "package": "mine",
    "extra_modules": ["mine.extra"],
    "wanted": [],
    "forbidden": ["wave"],
    "alone": False,
    "brings": ["mine"],
    "works": None,
    "refusals": [["import mine; mine.load()", 'pip install "mine[extra]"']],
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return an environment with one distribution in it, as an interpreter and a folder."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "mine-0.1.dist-info").mkdir()
    (packages / "mine-0.1.dist-info" / "METADATA").write_text("Name: mine\nVersion: 0.1\n")
    (packages / "mine").mkdir()
    return folder / "bin" / "python", packages / "mine"


@pytest.fixture
def look(environment):
    """Return a function that probes the package after changes to its texts and to the request."""
    python, folder = environment

    def look(texts=None, **changes):
        refuse = "def load():\n    raise ImportError('pip install \"mine[extra]\"')\n"
        sources = {"__init__": refuse, "plain": "", "extra": "import wave\n", **(texts or {})}
        for name, text in sources.items():
            Path(folder, f"{name}.py").write_text(text)
        command = [python, "-I", probe.__file__, json.dumps(REQUEST | changes)]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    return look


def test_a_package_that_keeps_its_promises_is_measured(look):
    result = look(alone=True, forbidden=["not_there"])
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["modules"], report["distributions"]) == (2, 1)
    assert report["bytes"] > 0
    assert report["seconds"] >= 0


def test_an_extra_that_brings_nothing_forbidden_is_not_imported_module_by_module(look):
    result = look({"plain": "import not_there\n"}, forbidden=["not_there"])
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["modules"], report["seconds"], report["distributions"]) == (None, None, 1)


def test_an_extra_may_load_what_the_package_may_not(look):
    result = look(wanted=["mine.extra"])
    assert json.loads(result.stdout)["modules"] == 3


def test_a_package_of_an_extra_is_not_entered_where_the_extra_is_not_wanted(look, environment):
    inside = environment[1] / "extra"
    inside.mkdir()
    (inside / "__init__.py").write_text("import wave\n")
    (inside / "deep.py").write_text("import wave\n")
    try:
        assert json.loads(look().stdout)["modules"] == 2
        assert json.loads(look(wanted=["mine.extra"]).stdout)["modules"] == 4
    finally:
        shutil.rmtree(inside)


@pytest.mark.parametrize(
    ("texts", "changes", "words"),
    [
        ({"plain": "import wave\n"}, {}, "importing mine loads wave"),
        ({"plain": "import not_there\n"}, {}, "No module named 'not_there'"),
        ({}, {"alone": True}, "mine alone brings wave"),
        ({}, {"brings": ["mine", "other"]}, "it brings ['mine'], not ['mine', 'other']"),
        ({}, {"wanted": ["mine.lost"]}, "the wheel lacks mine.lost"),
        ({}, {"works": "import mine.lost"}, "No module named 'mine.lost'"),
        ({"__init__": "def load(): pass\n"}, {}, "raises no ImportError"),
        ({"__init__": "def load():\n    raise ImportError('no')\n"}, {}, "does not say"),
        ({"__init__": "def load():\n    raise ValueError('no')\n"}, {}, "ValueError: no"),
    ],
)
def test_a_broken_promise_is_found(look, texts, changes, words):
    result = look(texts, **changes)
    assert result.returncode == 1
    assert words in result.stderr


def test_every_package_and_extra_is_installed_apart():
    wanted = apart.requirements()
    assert set(PROJECTS) <= set(wanted)
    assert {f"{name}[{extra}]" for name in PROJECTS for extra in extras(name)} <= set(wanted)


def test_the_tables_name_packages_extras_and_modules_that_are_there():
    assert apart.FORBIDDEN.keys() == PROJECTS.keys()
    assert apart.WORKS.keys() <= set(apart.requirements())
    assert apart.REFUSALS.keys() | apart.BRINGS.keys() <= PROJECTS.keys()
    for package, modules in apart.EXTRA_MODULES.items():
        assert modules.keys() <= extras(package).keys()
        assert all(
            part.startswith(import_name(package)) for names in modules.values() for part in names
        )


def test_the_table_has_a_line_for_each_install():
    row = {"distributions": 2, "bytes": 1_500_000, "modules": 11, "seconds": 0.25}
    other = row | {"modules": None, "seconds": None}
    head, line, last = apart.format_table({"mine": row, "mine[extra]": other}).splitlines()
    assert head.split() == ["installed", "distributions", "MB", "modules", "import", "s"]
    assert line.split() == ["mine", "2", "1.5", "11", "0.25"]
    assert last.split() == ["mine[extra]", "2", "1.5", "-", "-"]
