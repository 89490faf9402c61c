"""Rows of data: objects from JSON lines, Parquet, Hugging Face datasets, or a Python program.

A row keeps the place that it comes from, so that an error can name it. What a row has to hold is
for its reader to say, see `rl_policy.data.datasets`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DISK_FILES = ("dataset_info.json", "dataset_dict.json")
_LINES = (".json", ".jsonl")
_HUB_NAME = re.compile(r"\w[\w-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """An object of the data.

    Attributes:
        place: Where it stands: file and line, or the index in what was given.
        fields: Its values by name.
    """

    place: str
    fields: dict[str, Any]


class GivenRows:
    """Rows that a Python program gives, in the place of a file's name in the configuration.

    They are kept as JSON lines, so that a resumed run, which reads them from its directory, gets
    the same.

    Args:
        rows: Mappings: a list, a `datasets.Dataset`, a generator, or a function that returns one.
        key: The config key whose place they take, for the errors.

    Raises:
        ValueError: A row is no mapping, or holds what JSON does not; names its index.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]],
        *,
        key: str,
    ) -> None:
        self.key = key
        self.lines = tuple(_json_line(row, place=f"{key}[{i}]") for i, row in _enumerated(rows))
        if not self.lines:
            raise ValueError(f"{key} has no rows")

    def __deepcopy__(self, memo: dict[int, Any]) -> GivenRows:
        """Return itself: it is immutable."""
        return self

    def __str__(self) -> str:
        """Return what stands for them where a name would, which no file has."""
        return f"<{len(self.lines)} rows>"

    def write(self, path: Path) -> None:
        """Write the rows as JSON lines."""
        path.write_text("".join(line + "\n" for line in self.lines), encoding="utf-8")


def read_rows(source: str | Path | GivenRows, *, key: str, split: str = "train") -> list[Row]:
    """Return the rows of one source.

    Args:
        source: A file of JSON lines, or of a JSON list where its name ends in `.json`; a `.parquet`
            file; a directory of `Dataset.save_to_disk` or of data files; or the name of a dataset
            on the Hugging Face hub, where no file or directory has it.
        key: The config key that names it, for the errors.
        split: The split of a dataset that has several.

    Raises:
        ValueError: It cannot be read, or is empty; names key, file and line.
    """
    if isinstance(source, GivenRows):
        lines = enumerate(source.lines)
        return [Row(f"{source.key}[{index}]", json.loads(line)) for index, line in lines]
    path = Path(source)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except ValueError as error:  # a null byte in the path
        raise ValueError(f"{key}={source} cannot be read: {error}") from error
    # A file that is not there is not looked for on the hub.
    may_be_hub_name = path.suffix not in _LINES and _HUB_NAME.fullmatch(str(source)) is not None
    is_hub_name = not exists and may_be_hub_name
    if path.suffix == ".parquet" or is_directory or is_hub_name:
        rows = _dataset_rows(path, key=key, split=split)
    else:
        rows = _json_rows(path, key=key)
    if not rows:
        raise ValueError(f"{key}={source} is empty: give an object per line")
    return rows


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with the names that the recipes read.

    Args:
        row: Of the data.
        columns: `{our name: the data's}`.

    Raises:
        ValueError: The row lacks a column.
    """
    fields = dict(row.fields)
    for name, given in columns.items():
        if given not in row.fields:
            raise ValueError(
                f"{row.place}: has no {given!r}, which data.columns.{name} names: it has "
                f"{', '.join(map(repr, row.fields))}"
            )
        fields.pop(given, None)
    return Row(row.place, fields | {name: row.fields[given] for name, given in columns.items()})


def require_text(fields: Mapping[str, Any], name: str, *, place: str) -> str:
    """Return the text of a field.

    Raises:
        ValueError: There is none, or it is empty or no Unicode.
    """
    check_text(fields.get(name), place=f"{place}: {name!r}")
    return fields[name]


def check_text(text: Any, *, place: str) -> None:
    """Raise `ValueError`, which names the place, unless a value is a text that is not empty."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place} must be a text that is not empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} has half of a surrogate pair, which is no character") from None


def _enumerated(rows: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    iterable: Any = rows() if callable(rows) else rows
    # The texts of its splits' names are what a DatasetDict yields.
    if isinstance(iterable, Mapping):
        names = ", ".join(map(repr, iterable))
        raise ValueError(f"data must be rows, got a mapping with {names}: take one of them")
    for index, row in enumerate(iterable):
        if not isinstance(row, Mapping):
            raise ValueError(f"data: row {index} must be a mapping, got {type(row).__name__}")
        yield index, row


def _json_line(row: Mapping[str, Any], *, place: str) -> str:
    try:
        return json.dumps(dict(row))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} cannot be kept as JSON: {error}") from error


def _json_rows(path: Path, *, key: str) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # bytes that are no UTF-8
        raise ValueError(f"{key}={path} cannot be read: {error}") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        content = _parse(text, place=str(path))
        return [_object_row(each, place=f"{path}[{index}]") for index, each in enumerate(content)]
    return [
        _object_row(_parse(line, place=f"{path}:{number}"), place=f"{path}:{number}")
        # Not `splitlines`: JSON texts may hold other separators of lines, such as U+2028.
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _parse(text: str, *, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError:
        raise ValueError(f"{place}: not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"{place}: not JSON that can be read: {error}") from error


def _object_row(content: Any, *, place: str) -> Row:
    if not isinstance(content, dict):
        raise ValueError(f"{place}: must be an object, got {type(content).__name__}")
    return Row(place, content)


def _dataset_rows(path: Path, *, key: str, split: str) -> list[Row]:
    try:
        import datasets
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{key}={path} is no file of JSON lines, and the package datasets, which reads others, "
            'is not installed: pip install "rl-policy[datasets]"'
        ) from error
    try:
        if path.suffix == ".parquet":
            loaded: Any = pyarrow.parquet.read_table(str(path)).to_pylist()
        elif any((path / name).is_file() for name in _DISK_FILES):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), split=split)
    except Exception as error:  # of datasets, of the hub, or of Arrow
        raise ValueError(f"{key}={path} cannot be read: {' '.join(str(error).split())}") from error
    if isinstance(loaded, Mapping):
        if split not in loaded:
            names = ", ".join(map(repr, loaded))
            raise ValueError(f"{key}={path} has no split data.split={split!r}: it has {names}")
        loaded = loaded[split]
    return [Row(f"{path}[{index}]", dict(row)) for index, row in enumerate(loaded)]
