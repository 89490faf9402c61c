"""Rows of data: objects from JSON lines, Parquet, Hugging Face datasets, or a Python program.

A row keeps the place that it comes from, so that an error can name it. What a row has to hold is
for its reader to say, see `rl_policy.data.datasets`.
"""

from __future__ import annotations

import codecs
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

ItemT = TypeVar("ItemT")

_LOGGER = logging.getLogger(__name__)

MOST_ROWS_IN_MEMORY = 100_000
"""More rows of one dataset are read whenever they are needed."""
# Of JSON lines: about as many rows of the length of a question with its answer.
_MOST_BYTES_IN_MEMORY = 32 * 2**20
_BLOCK_BYTES = 4 * 2**20
_LINES_PER_BLOCK = 1000
_SHOWN_ROWS = 200_000
_MOST_BLANKS = 16

# Names that public datasets have for our columns, the most specific first.
_SYNONYMS = {
    "prompt": (
        "question", "problem", "instruction", "query", "input", "inputs", "user", "text", "source",
    ),
    "answer": (
        "solution", "answers", "response", "completion", "output", "outputs", "target", "targets",
        "ground_truth", "final_answer", "expected_answer", "label", "assistant", "reply",
    ),
    "chosen": ("accepted", "preferred", "better", "win", "response_chosen", "positive"),
    "rejected": ("dispreferred", "worse", "lose", "response_rejected", "negative"),
}  # fmt: skip
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


def read_rows(source: str | Path | GivenRows, *, key: str, split: str = "train") -> Sequence[Row]:
    """Return the rows of one source: a list, or if it is large a sequence that reads them from it.

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


class LineFile(Sequence[Row]):
    """The rows of a file of JSON lines, which are read from the file whenever they are needed.

    Only the places of the lines are in memory: 16 bytes a row.

    Args:
        path: The file, in UTF-8. Blank lines are no rows.
        key: The config key that names it, for the errors.

    Raises:
        OSError: It cannot be read.
    """

    def __init__(self, path: Path, *, key: str) -> None:
        self._path, self._key = path, key
        self._file = path.open("rb")
        self._starts, self._ends, self._numbers = _find_lines(self._file)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a row."""
        start, end = int(self._starts[index]), int(self._ends[index])
        line = os.pread(self._file.fileno(), end - start, start)
        return self._row(line, int(self._numbers[index]))

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, in blocks of lines."""
        for first in range(0, len(self), _LINES_PER_BLOCK):
            last = min(first + _LINES_PER_BLOCK, len(self)) - 1
            start = int(self._starts[first])
            block = os.pread(self._file.fileno(), int(self._ends[last]) - start, start)
            for at in range(first, last + 1):
                line = block[int(self._starts[at]) - start : int(self._ends[at]) - start]
                yield self._row(line, int(self._numbers[at]))

    def _row(self, line: bytes, number: int) -> Row:
        place = f"{self._path}:{number}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            reason = f"line {number} is not UTF-8: {error}"
            raise ValueError(f"{self._key}={self._path} cannot be read: {reason}") from error
        return _object_row(_parse(text, place=place), place=place)


def _find_lines(file: BinaryIO) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the lines of a file start and end, and their numbers, without blank lines."""
    newlines: list[np.ndarray] = []
    offset = 0
    while block := file.read(_BLOCK_BYTES):
        newlines.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset)
        offset += len(block)
    breaks = np.concatenate([*newlines, [offset]]).astype(np.int64)
    starts = np.concatenate([[0], breaks[:-1] + 1])
    numbers = np.arange(1, len(starts) + 1, dtype=np.int32)
    file.seek(0)
    if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
        starts[0] = len(codecs.BOM_UTF8)
    lengths = breaks - starts
    is_blank = lengths <= 0
    # An object has two characters at least; a line that may be white space is looked at.
    for at in np.flatnonzero(~is_blank & (lengths <= _MOST_BLANKS)):
        start = int(starts[at])
        is_blank[at] = not os.pread(file.fileno(), int(lengths[at]), start).strip()
    return starts[~is_blank], breaks[~is_blank], numbers[~is_blank]


class DatasetRows(Sequence[Row]):
    """The rows of a `datasets.Dataset`, which has them in Arrow files on the disk.

    Args:
        dataset: The dataset.
        place: What it was read from, for the errors.
    """

    def __init__(self, dataset: Any, *, place: str) -> None:
        self._dataset, self._place = dataset, place

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a row."""
        return Row(f"{self._place}[{index}]", dict(self._dataset[index]))

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, in blocks."""
        index = 0
        for block in self._dataset.iter(batch_size=_LINES_PER_BLOCK):
            for values in zip(*block.values(), strict=True):
                yield Row(f"{self._place}[{index}]", dict(zip(block, values, strict=True)))
                index += 1


def with_progress(
    items: Iterable[ItemT], *, total: int, text: str, size: int = 1
) -> Iterator[ItemT]:
    """Yield items, and show a bar on the standard error if there are many.

    Args:
        items: The items.
        total: The number of rows.
        text: Describes what is done.
        size: Rows of an item.
    """
    if total < _SHOWN_ROWS:
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        _LOGGER.warning("%s: %d rows", text, total)
        yield from items
        return
    with Progress(console=console, transient=True, refresh_per_second=2) as progress:
        task = progress.add_task(text, total=total)
        for count, item in enumerate(items, start=1):
            yield item
            if size > 1 or count % _LINES_PER_BLOCK == 0:
                progress.update(task, completed=count * size)


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with the names that the recipes read.

    Args:
        row: A row of the data.
        columns: `{our name: the data's}`. One that the row has under our name stays as it is, so
            that several files may have different names.

    Raises:
        ValueError: The row lacks a column.
    """
    fields = dict(row.fields)
    given = {name: theirs for name, theirs in columns.items() if theirs in row.fields}
    for name, theirs in columns.items():
        if name not in given and name not in fields:
            raise ValueError(
                f"{row.place}: has no {theirs!r}, which data.columns.{name} names; its keys are "
                f"{', '.join(map(str, row.fields))}"
            )
    for theirs in given.values():
        fields.pop(theirs, None)
    return Row(row.place, fields | {name: row.fields[theirs] for name, theirs in given.items()})


def require_columns(row: Row, names: Sequence[str]) -> None:
    """Raise `ValueError` if a row lacks a column, with the mapping that would give it.

    Args:
        row: A row with the names that recipes read.
        names: The columns. A conversation as `messages` may stand for `prompt` and `answer`.
    """
    has_messages = row.fields.get("prompt") is None and "messages" in row.fields
    implied = ("prompt", "answer") if has_messages else ()
    missing = [name for name in names if name not in row.fields and name not in implied]
    if not missing:
        return
    keys = ", ".join(map(str, row.fields)) or "none"
    mapping = _guess_columns(row, missing, needed=names)
    if mapping:
        listed = ", ".join(f"{name}: {_yaml_name(theirs)}" for name, theirs in mapping.items())
        remedy = f"Map yours: data.columns={{{listed}}}"
    else:
        remedy = f"Add it, or name its column: data.columns={{{missing[0]}: NAME}}"
    raise ValueError(f"{row.place} has no {missing[0]!r}; its keys are {keys}. {remedy}")


def _guess_columns(row: Row, missing: Sequence[str], *, needed: Sequence[str]) -> dict[str, str]:
    """Return which columns of a row probably are the missing ones; empty if too few are left."""
    free = [key for key in row.fields if key not in needed]
    if "prompt" in missing:
        for key in free:
            value = row.fields[key]
            if isinstance(value, list) and value and isinstance(value[0], Mapping):
                rest = [name for name in missing if name not in ("prompt", "answer")]
                guessed = _guess_columns(Row(row.place, row.fields), rest, needed=[*needed, key])
                return {"messages": key} | guessed if len(guessed) == len(rest) else {}
    mapping: dict[str, str] = {}
    for name in missing:
        known = [key for key in free if key.lower() in _SYNONYMS.get(name, ())]
        if known:
            known.sort(key=lambda key: _SYNONYMS[name].index(key.lower()))
            mapping[name] = known[0]
            free.remove(known[0])
    for name in missing:
        if name not in mapping and free:
            mapping[name] = free.pop(0)
    ordered = {name: mapping[name] for name in missing if name in mapping}
    return ordered if len(ordered) == len(missing) else {}


def _yaml_name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z_][\w.-]*", key) else json.dumps(key)


def text_of(value: Any) -> Any:
    """Return a number, a boolean or a list as its text in JSON; None for NaN; others as they are.

    Example:
        text_of(4) -> "4", text_of(True) -> "true", text_of([1, 2]) -> "[1, 2]"
    """
    if isinstance(value, float) and math.isnan(value):
        return None  # what Arrow has for a number that is missing
    if isinstance(value, bool | int | float | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value


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


def _json_rows(path: Path, *, key: str) -> Sequence[Row]:
    try:
        if path.suffix != ".json" and path.stat().st_size > _MOST_BYTES_IN_MEMORY:
            return LineFile(path, key=key)
        text = _decode(path.read_bytes())
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


def _decode(content: bytes) -> str:
    """Return the text of a file by its byte order mark; UTF-8 without one."""
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):
        if content.startswith(mark):
            return content.decode(encoding)
    return content.decode("utf-8-sig")


def _parse(text: str, *, place: str) -> Any:
    try:
        # A byte order mark within a file is of another that was appended to it.
        return json.loads(text[1:] if text[:1] == "\ufeff" else text)
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


def _dataset_rows(path: Path, *, key: str, split: str) -> Sequence[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{key}={path} is no file of JSON lines, and the package datasets, which reads others, "
            'is not installed: pip install "rl-policy[datasets]"'
        ) from error
    try:
        if path.suffix == ".parquet":
            loaded: Any = _read_parquet(path)
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
    if len(loaded) > MOST_ROWS_IN_MEMORY:
        return DatasetRows(loaded, place=str(path))
    return [Row(f"{path}[{index}]", dict(row)) for index, row in enumerate(loaded)]


def _read_parquet(path: Path) -> Any:
    import datasets
    import pyarrow.parquet

    if pyarrow.parquet.read_metadata(str(path)).num_rows <= MOST_ROWS_IN_MEMORY:
        return pyarrow.parquet.read_table(str(path)).to_pylist()
    return datasets.load_dataset("parquet", data_files=str(path), split="train")
