import subprocess

import pytest

from checks import surface_check


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a function that writes files of the package `mine` and commits them."""
    monkeypatch.setattr(surface_check, "ROOT", tmp_path)
    for variable in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{variable}_NAME", "a")
        monkeypatch.setenv(f"GIT_{variable}_EMAIL", "a@example.org")
    run_git(tmp_path, "init", "--quiet", "--initial-branch=main")
    folder = tmp_path / "packages" / "mine"
    folder.mkdir(parents=True)

    def commit(**texts: str) -> None:
        for name, text in texts.items():
            (folder / f"{name}.{'md' if name == 'CHANGELOG' else 'txt'}").write_text(text)
        run_git(tmp_path, "add", "--all")
        run_git(tmp_path, "commit", "--quiet", "--allow-empty", "--message=x")

    return commit


def run_git(folder, *arguments):
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def complaints():
    return surface_check.unrecorded_change("mine", surface_check.fork_point(None))


def test_a_change_on_a_branch_has_to_reach_the_changelog(repository, tmp_path):
    repository(api="a\n", CHANGELOG="1\n")
    run_git(tmp_path, "switch", "--quiet", "--create", "work")
    assert complaints() == []
    repository(api="b\n")
    assert "tell users in packages/mine/CHANGELOG.md" in complaints()[0]
    repository(CHANGELOG="2\n")
    assert complaints() == []


def test_a_change_that_is_not_committed_counts(repository, tmp_path):
    repository(api="a\n", CHANGELOG="1\n")
    run_git(tmp_path, "switch", "--quiet", "--create", "work")
    (tmp_path / "packages" / "mine" / "api.txt").write_text("b\n")
    assert len(complaints()) == 1


def test_main_is_held_against_the_commit_before(repository):
    repository(api="a\n", CHANGELOG="1\n")
    repository(api="b\n")
    assert len(complaints()) == 1
    repository()
    assert complaints() == []


def test_the_first_list_of_a_package_is_no_change(repository):
    repository(CHANGELOG="1\n")
    repository(api="a\n")
    assert complaints() == []


def test_without_history_nothing_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(surface_check, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert surface_check.fork_point(None) is None
    assert complaints() == []


def test_a_base_that_is_no_commit_is_refused(repository):
    repository(api="a\n")
    with pytest.raises(SystemExit, match="--base nothing names no commit"):
        surface_check.fork_point("nothing")
