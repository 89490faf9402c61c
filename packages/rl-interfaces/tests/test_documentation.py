"""What a reader is promised: every public class, function and key says what it is."""

import ast
from pathlib import Path

import pytest
import rl_interfaces

pytestmark = pytest.mark.promise

SOURCES = Path(rl_interfaces.__file__).parent
MODULES = sorted([*SOURCES.glob("*.py"), *SOURCES.glob("config/*.py")])
# A data spec is understood from numbers.
DATA_SPECS = [
    "GenerationDatumSpec",
    "GenerationOutputSpec",
    "LogprobOutputSpec",
    "LossFunction",
    "ReferenceLogprobOutputSpec",
    "ScoreOutputSpec",
    "TopkLogitsOutputSpec",
]


def public_definitions(module):
    """Yield every public class and function of a module, methods of public classes among them."""
    holders = [ast.parse(module.read_text())]
    while holders:
        for node in ast.iter_child_nodes(holders.pop()):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield node
                holders += [node] if isinstance(node, ast.ClassDef) else []


def undocumented_fields(node):
    """Return the annotated or assigned names of a class body that no string follows."""
    following = [*node.body[1:], None]
    return [
        ast.unparse(statement)
        for statement, after in zip(node.body, following, strict=True)
        if isinstance(statement, ast.AnnAssign | ast.Assign)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]


def declares_fields(node):
    bases = {ast.unparse(base) for base in node.bases}
    return bool(bases & {"TypedDict", "Enum"})


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_every_public_class_and_function_is_documented(module):
    assert ast.get_docstring(ast.parse(module.read_text()))
    bare = [node.name for node in public_definitions(module) if not ast.get_docstring(node)]
    assert bare == []


def test_every_key_and_enum_member_is_documented():
    classes = [
        node
        for module in MODULES
        for node in public_definitions(module)
        if isinstance(node, ast.ClassDef) and declares_fields(node)
    ]
    assert {"PolicyConfig", "GenerationDatumSpec", "ResidencyState"} <= {c.name for c in classes}
    assert {c.name: fields for c in classes if (fields := undocumented_fields(c))} == {}


@pytest.mark.parametrize("name", DATA_SPECS)
def test_every_data_spec_has_a_worked_example(name):
    text = getattr(rl_interfaces, name).__doc__
    assert "Example" in text
    assert any(character.isdigit() for character in text.partition("Example")[2])
