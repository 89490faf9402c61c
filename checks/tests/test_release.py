import pytest

from checks import bounds, release
from checks.workspace import PROJECTS

PACKAGES = {
    "bottom": {"version": "0.2.0", "dependencies": [], "optional-dependencies": {"x": ["numpy"]}},
    "top": {
        "version": "0.3.1",
        "dependencies": ["bottom>=0.1,<0.2", "numpy>=2.1"],
        "optional-dependencies": {"more": ["bottom[y]>=0.2,<0.3"], "all": ["top[more]"]},
    },
}


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("rl-refit-v0.3.0", ("rl-refit", "0.3.0")),
        ("refs/tags/rl-batched-data-v1.20.3", ("rl-batched-data", "1.20.3")),
        ("rl-policy-v0.4.0rc1", ("rl-policy", "0.4.0rc1")),
    ],
)
def test_a_tag_names_a_package_and_a_version(tag, expected):
    assert release.parse_tag(tag) == expected


@pytest.mark.parametrize(
    "tag",
    ["v0.3.0", "rl-refit-0.3.0", "rl-refit-v0.3", "rl-refit-v0.3.0-x", "rl-refit-v0.3.0\n", ""],
)
def test_what_is_no_tag_of_a_release_is_refused(tag):
    with pytest.raises(ValueError, match="is not <package>-v<version>"):
        release.parse_tag(tag)


def test_a_tag_holds_only_for_its_package_and_version():
    assert release.tag_problems("top", "0.3.1", "top-v0.3.1") == []
    assert "top-v0.3.1" in release.tag_problems("top", "0.3.1", "top-v0.3.2")[0]
    assert "top-v0.3.1" in release.tag_problems("top", "0.3.1", "bottom-v0.3.1")[0]


@pytest.mark.parametrize(
    ("changelog", "first"),
    [
        ("# Changelog\n\n## 0.3.0\n", "0.3.0"),
        ("# Changelog\n\n## Unreleased\n\n## 0.3.1\n", "Unreleased"),
        ("# Changelog\n", "nothing"),
    ],
)
def test_a_changelog_begins_with_the_version(changelog, first):
    assert release.changelog_problems("top", "0.3.1", "# Changelog\n\n## 0.3.1\n\n- New.\n") == []
    assert f"begins with {first}" in release.changelog_problems("top", "0.3.1", changelog)[0]


def test_ranges_and_extras_of_siblings_are_held_against_them():
    assert release.range_problems("bottom", PACKAGES) == []
    assert release.range_problems("top", PACKAGES) == [
        "top asks for bottom<0.2,>=0.1, and bottom is 0.2.0",
        "top asks for bottom[y]<0.3,>=0.2, which has no extra y",
    ]


GOOD_WHEEL = [
    "rl_refit/__init__.py",
    "rl_refit/py.typed",
    "rl_refit-0.1.0.dist-info/METADATA",
    "rl_refit-0.1.0.dist-info/licenses/LICENSE",
]
GOOD_SDIST = ["pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src/rl_refit/__init__.py"]


def test_the_files_hold_what_they_should():
    assert release.missing_or_astray("rl-refit", in_sdist=GOOD_SDIST, in_wheel=GOOD_WHEEL) == []


@pytest.mark.parametrize("name", GOOD_SDIST)
def test_an_sdist_that_lacks_something_is_found(name):
    kept = [other for other in GOOD_SDIST if other != name]
    (found,) = release.missing_or_astray("rl-refit", in_sdist=kept, in_wheel=GOOD_WHEEL)
    assert found.endswith(f"lacks {name}")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([*GOOD_WHEEL, "tests/test_plan.py"], "holds tests"),
        ([*GOOD_WHEEL, "rl_policy/__init__.py"], "holds rl_policy"),
        (GOOD_WHEEL[:1] + GOOD_WHEEL[2:], "lacks rl_refit/py.typed"),
        (GOOD_WHEEL[:-1], "lacks its LICENSE"),
    ],
)
def test_a_wheel_that_lacks_something_or_holds_more_is_found(names, words):
    (found,) = release.missing_or_astray("rl-refit", in_sdist=GOOD_SDIST, in_wheel=names)
    assert words in found


@pytest.mark.parametrize("package", PROJECTS)
def test_no_package_asks_for_a_sibling_that_is_not_there(package):
    assert release.range_problems(package) == []


def test_a_link_out_of_the_package_is_found():
    text = "[a](../../README.md) [b](https://example.org/a) [c](#part) ![d](docs/e.svg)"
    assert release._RELATIVE_LINK.findall(text) == ["../../README.md", "docs/e.svg"]


def test_a_bound_that_nobody_can_get_is_found():
    assert bounds.higher_than_declared("top", {"numpy": "2.1.0"}, PACKAGES) == []
    (found,) = bounds.higher_than_declared("top", {"numpy": "2.1.1"}, PACKAGES)
    assert found.startswith("numpy>=2.1 is declared and 2.1.1")
