from types import UnionType
from typing import Any, Literal, NotRequired, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_interfaces import PolicyConfig, check_typed_dict
from typing_extensions import TypedDict


class Inner(TypedDict):
    width: int


class Other(TypedDict):
    height: int


class Section(TypedDict):
    count: int
    rate: float
    name: str
    enabled: bool
    numbers: list[int]
    table: dict[str, list[int]]
    free: dict[str, Any]
    inner: NotRequired[Inner]
    either: list[Inner | dict[str, list[int]]] | Inner | dict[str, list[int]]
    limit: int | None
    size: int | Literal["auto"]


def refusal(value):
    with pytest.raises(ValueError, match=r"^top") as raised:
        check_typed_dict(value, Section, path="top")
    return str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"count": 1, "rate": 1, "name": "", "enabled": False},
        {"rate": 0.5, "numbers": [], "table": {"a": [1, 2]}},
        {"free": {"a": {"b": [None, object]}}},
        {"inner": {"width": 1}},
        {"inner": {}},
        {"either": {"width": 1}},
        {"either": {"milestones": [1, 2]}},
        {"either": [{"width": 1}, {"milestones": [3]}]},
        {"limit": 3},
        {"size": 3},
        {"size": "auto"},
        {"limit": None, "count": None, "inner": None, "numbers": None},
        {"inner": {"width": None}},
    ],
)
def test_a_fitting_value_passes(value):
    check_typed_dict(value, Section, path="top")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "top must be a mapping, got list []"),
        (None, "top must be a mapping, got None"),
        ({"count": 1.5}, "top.count must be int, got float 1.5"),
        ({"count": True}, "top.count must be int, got bool True"),
        ({"count": "3"}, "top.count must be int, got str '3'"),
        ({"rate": "1e-5"}, "top.rate must be float, got str '1e-5'"),
        ({"rate": True}, "top.rate must be float, got bool True"),
        ({"name": 3}, "top.name must be str, got int 3"),
        ({"enabled": 1}, "top.enabled must be bool, got int 1"),
        ({"enabled": "true"}, "top.enabled must be bool, got str 'true'"),
        ({"numbers": 3}, "top.numbers must be a list, got int 3"),
        ({"numbers": [1, "a"]}, "top.numbers[1] must be int, got str 'a'"),
        ({"numbers": [None]}, "top.numbers[0] must be int, got None"),
        ({"table": [1]}, "top.table must be a mapping, got list [1]"),
        ({"table": {"a": 1}}, "top.table.a must be a list, got int 1"),
        ({"table": {"a": [1, 2.5]}}, "top.table.a[1] must be int, got float 2.5"),
        ({"inner": 3}, "top.inner must be a mapping, got int 3"),
        ({"inner": {"width": "a"}}, "top.inner.width must be int, got str 'a'"),
        ({"limit": "a"}, "top.limit must be int or None, got str 'a'"),
        ({"size": "other"}, "top.size must be int or 'auto', got str 'other'"),
        ({"size": True}, "top.size must be int or 'auto', got bool True"),
        ({"either": 3}, "top.either must be list or Inner or dict, got int 3"),
        ({"either": {"width": "a"}}, "top.either.width must be int, got str 'a'"),
        ({"either": {"widht": 1}}, "top.either.widht is not a known key, did you mean 'width'?"),
        ({"either": {"steps": ["a"]}}, "top.either.steps[0] must be int, got str 'a'"),
        ({"either": [{"width": 1}, 3]}, "top.either[1] must be Inner or dict, got int 3"),
        ({"either": [{"steps": ["a"]}]}, "top.either[0].steps[0] must be int, got str 'a'"),
        ({"cuont": 1}, "top.cuont is not a known key, did you mean 'count'?"),
        ({"cuont": None}, "top.cuont is not a known key, did you mean 'count'?"),
        ({3: 1}, f"top.3 is not a known key, the keys are {sorted(get_type_hints(Section))}"),
        ({"inner": {"zzz": 1}}, "top.inner.zzz is not a known key, the keys are ['width']"),
    ],
)
def test_what_does_not_fit_is_named(value, message):
    assert refusal(value) == message


@given(key=st.text().filter(lambda key: key not in Section.__annotations__), value=st.integers())
def test_no_unknown_key_passes(key, value):
    assert refusal({"count": 1, key: value}).startswith(f"top.{key} is not a known key, ")


WRONG = {str: 3, int: "three", float: "0.1", bool: "yes"}


def scalar_keys(typed_dict, prefix=()):
    """Yield the path and the type of each key of a TypedDict that holds one plain value."""
    for key, hint in get_type_hints(typed_dict).items():
        if hint in WRONG:
            yield (*prefix, key), hint
        elif hasattr(hint, "__total__"):
            yield from scalar_keys(hint, (*prefix, key))
        elif get_origin(hint) is UnionType and str in get_args(hint):
            yield (*prefix, key), str


@pytest.mark.parametrize(("keys", "expected"), list(scalar_keys(PolicyConfig)))
def test_every_plain_key_of_a_policy_refuses_another_type(keys, expected):
    value = WRONG[expected]
    for key in reversed(keys):
        value = {key: value}
    path = ".".join(("policy", *keys))
    with pytest.raises(ValueError, match=r"must be") as raised:
        check_typed_dict(value, PolicyConfig, path="policy")
    assert str(raised.value).startswith(f"{path} must be {expected.__name__}")
    assert repr(WRONG[expected]) in str(raised.value)
