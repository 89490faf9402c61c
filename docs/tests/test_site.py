"""The built site fetches nothing from elsewhere, and shows what it promises."""

import ast
import re
import tomllib

import pytest
from code_blocks import ROOT
from rl_interfaces import POLICY_DEFAULTS, PolicyConfig

SITE = ROOT / "build" / "site"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages():
    """Return the text of every page of the site that `nox -s docs` has built."""
    found = {path.relative_to(SITE).as_posix(): path.read_text() for path in SITE.rglob("*.html")}
    assert found, "mkdocs build --strict --config-file docs/mkdocs.yml comes first"
    return found


def test_no_page_loads_anything_from_elsewhere(pages):
    loads = re.compile(
        r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//|<link[^>]+href="?https?://'
    )
    assert [name for name, text in pages.items() if loads.search(text)] == []
    # The theme would fetch its renderer for these.
    assert [name for name, text in pages.items() if 'class="mermaid' in text] == []
    styles = "".join(path.read_text() for path in SITE.rglob("*.css"))
    assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", styles)


def test_drawings_stand_in_the_page_with_a_title_and_a_description(pages):
    for name, text in pages.items():
        drawings = re.findall(r'<figure class="drawn">(.*?)</figure>', text, flags=re.DOTALL)
        for drawing in drawings:
            assert "<title" in drawing, name
            assert "<desc" in drawing, name
            assert "currentColor" in drawing, name
        assert ".svg)" not in text, name
    assert 'class="drawn"' in pages["index.html"]
    assert 'class="drawn"' in pages["contract.html"]


def test_the_reference_has_every_key_with_its_default(pages):
    text = pages["configuration.html"]
    for key in PolicyConfig.__annotations__:
        assert f"<code>{key}</code>" in text, key
    batch_size = POLICY_DEFAULTS["train_global_batch_size"]
    row = re.search(r"<tr>\s*<td><code>train_global_batch_size</code>.*?</tr>", text, re.DOTALL)
    assert row is not None
    assert f"<code>{batch_size}</code>" in row.group()
    assert "{{" not in text


def public_names(package):
    """Return the `__all__` of a package's `__init__.py`."""
    for node in ast.parse(package.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{package} has no __all__")


def test_every_package_shows_its_public_names(pages):
    for folder in (ROOT / "packages").iterdir():
        text = pages[f"packages/{folder.name}.html"]
        (package,) = (folder / "src").glob("*/__init__.py")
        shown = set(re.findall(rf'id="{package.parent.name}[\w.]*\.(\w+)"', text))
        assert set(public_names(package)) <= shown, folder.name


def test_every_public_module_is_shown(pages):
    shown, wanted = {}, {}
    for folder in (ROOT / "packages").iterdir():
        package = folder.name.replace("-", "_")
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        modules = project.get("tool", {}).get("surface", {}).get("modules", [])
        ids = re.findall(r'id="([\w.]+)"', pages[f"packages/{folder.name}.html"])
        wanted[package] = set(modules)
        shown[package] = {
            module for module in modules if any(i.startswith(f"{package}.{module}.") for i in ids)
        }
    assert shown == wanted
    assert any(wanted.values())


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("rl-policy", "rl_policy.Policy.save_adapters"),
        ("rl-dtensor-worker", "rl_dtensor_worker.DTensorPolicyWorker.get_logprobs"),
        ("rl-megatron-worker", "rl_megatron_worker.MegatronPolicyWorker.get_logprobs"),
    ],
)
def test_calls_that_a_class_inherits_are_shown(pages, page, name):
    assert f'id="{name}"' in pages[f"packages/{page}.html"]
