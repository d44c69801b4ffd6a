"""Images in the tables of a Hugging Face data set, Parquet or Arrow files: the source `parquet`."""

import bisect
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from ..errors import UserError, as_user_error, in_one_line, needs, suggest
from ..hub import hub_name, table_folder
from ..untrusted import parse_json
from .decode import MOST_BYTES, EncodedImages, Undecodable, load_decoders
from .file_lists import files_by_split, files_under, number_labels, says_split
from .types import Int64

SUFFIXES = (".parquet", ".arrow")
_IMAGES = ("image", "img", "jpg", "png", "picture")
_LABELS = ("label", "labels", "cls", "class", "fine_label", "target")
MOST_CACHED = 1 << 30  # bytes of unpacked row groups in the memory of a process


# An Arrow file is mapped, so a row is read in place. A row of a Parquet file costs its whole row group, up to some 100
# MB that must be unpacked: row groups stay in memory once read, and a larger set must be packed into tar shards.
@dataclass(frozen=True)
class Part:
    """Rows of a table that are read together."""

    rows: int
    size: int  # bytes in memory; 0 if the file is mapped
    read: Callable[[], Any]  # returns the images, a `pyarrow.ChunkedArray` of bytes


class TableImages(EncodedImages):
    """A source of the images in tables; `path` is the folder or name of the data set, for messages."""

    def __init__(
        self, parts: Sequence[Part], path: Path, files: Sequence[Path],
        classes: Sequence[str], labels: Int64, channels: int,
    ) -> None:  # fmt: skip
        super().__init__(classes, labels, channels)
        self._parts, self._path, self._files = parts, path, files
        self.memory = sum(part.size for part in parts)
        self._begins = np.concatenate([[0], np.cumsum([part.rows for part in parts])]).tolist()
        self._cached: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"

    def encoded(self, index: int) -> bytes:
        number = bisect.bisect_right(self._begins, index) - 1
        data = self._column(number)[index - self._begins[number]].as_py()
        if data is None or len(data) > MOST_BYTES:
            raise Undecodable("no image" if data is None else f"{len(data)} bytes; at most {MOST_BYTES} are read")
        return data

    def add_to_hash(self, digest: Any, sample: Int64) -> None:
        known = hashlib.sha256()
        for file in self._files:
            known.update(f"{file.name}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
        digest.update(known.hexdigest().encode())

    def _column(self, number: int) -> Any:
        """The images of a part, cached; the part that was used longest ago leaves the cache first."""
        with self._lock:
            # Under the lock, so that no two threads unpack one row group at a time.
            if number not in self._cached:
                self._cached[number] = self._parts[number].read()
                while len(self._cached) > 1 and sum(self._parts[each].size for each in self._cached) > MOST_CACHED:
                    self._cached.popitem(last=False)
            self._cached.move_to_end(number)
            return self._cached[number]


@dataclass(frozen=True)
class _File:
    path: Path
    arrow: Any  # a mapped `pyarrow.Table`; None for a Parquet file
    parquet: Any  # a `pyarrow.parquet.ParquetFile`; None for an Arrow file

    @cached_property
    def schema(self) -> Any:
        return self.arrow.schema if self.parquet is None else self.parquet.schema_arrow

    def column(self, name: str) -> Any:
        return (self.arrow if self.parquet is None else self.parquet.read([name], use_threads=False)).column(name)

    def parts(self, name: str) -> list[Part]:
        if self.parquet is None:
            # A mapped file is one part: the system reads the pages that a row needs.
            return [Part(self.arrow.num_rows, 0, lambda: _bytes_of(self.column(name)))]
        groups = enumerate(map(self.parquet.metadata.row_group, range(self.parquet.num_row_groups)))
        return [Part(each.num_rows, each.total_byte_size, partial(self._group, n, name)) for n, each in groups]

    def _group(self, number: int, name: str) -> Any:
        try:
            group = self.parquet.read_row_group(number, [name], use_threads=False)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None):  # of the disk; pyarrow's own, of damaged pages, have none
                raise
            raise UserError(f"{self.path}: row group {number} can't be read: {in_one_line(error)}") from None
        return _bytes_of(group.column(name))

    def is_empty(self, name: str) -> bool:
        """Whether no row has an image, as far as that is known without reading any."""
        if self.parquet is None:
            return _bytes_of(self.column(name)).null_count == self.arrow.num_rows
        groups = map(self.parquet.metadata.row_group, range(self.parquet.num_row_groups))
        columns = (group.column(at) for group in groups for at in range(group.num_columns))
        found = [each for each in columns if each.path_in_schema in (name, f"{name}.bytes")]
        nulls = (each.statistics.null_count if each.statistics else None for each in found)
        return found != [] and all(null == each.num_values for null, each in zip(nulls, found, strict=True))


def open_tables(
    path: Path, channels: int, image: str | None = None, label: str | None = None, subset: str | None = None
) -> tuple[TableImages, TableImages]:
    """Images of a data set in Parquet or Arrow files, in a folder or on the hub, in the order of the files' names.

    The name of a file or of its folder says its split, as for tar files. The columns `image` and `label` are found by
    name and type if they are not given; `subset` is the folder to read if several sets stand side by side.
    """
    load_decoders()
    root = path if (name := hub_name(path)) is None else table_folder(name)
    by_split = files_by_split(path, _of_subset(path, files_under(root), subset), SUFFIXES)
    files = {split: [_open(root / name) for name in names] for split, names in by_split.items()}
    first = files["train"][0]
    image = _column(first, image, "image", _IMAGES, _is_image)
    label = _column(first, label, "label", _LABELS, _is_label)
    for file in (file for each in files.values() for file in each):
        _column(file, image, "image", (), _is_image)
        _column(file, label, "label", (), _is_label)
    texts, parts = dict[str, list[str]](), dict[str, list[Part]]()
    for split, each in files.items():
        with as_user_error(f"{path}: the tables of {split} can't be read", of=(OSError, ValueError, KeyError)):
            # Labels are read whole at the start, images only when they are needed.
            columns = [file.column(label).to_pylist() for file in each]
            values = [value for column in columns for value in column]
            if None in values:
                raise UserError(f"{path}: row {values.index(None)} of {split} has no label, counted from 0")
            pairs = zip(each, columns, strict=True)
            texts[split] = [text for file, column in pairs for text in _texts(column, file, label, first)]
            parts[split] = [part for file in each for part in file.parts(image)]
            if values and all(file.is_empty(image) for file in each):
                what = "names its images but doesn't hold them"
                raise UserError(f"{each[0].path}: {what}; give their folder to the source folder")
    classes, labels = number_labels(texts, _names(first.schema, label), str(path))
    train, held_out = (
        TableImages(parts[split], path, [file.path for file in each], classes, labels[split], channels)
        for split, each in files.items()
    )
    return train, held_out


def check_memory(path: Path, tables: Sequence[TableImages]) -> None:
    """UserError if the Parquet files don't fit into memory, as images in any order require."""
    if (size := sum(each.memory for each in tables)) > MOST_CACHED:
        what = f"{size:,} bytes of Parquet, whose rows can't be read one by one"
        raise UserError(f"{path}: {what}; pack them first: torusgd data pack {quote(str(path))} OUT")


def _of_subset(path: Path, names: Sequence[str], subset: str | None) -> list[str]:
    """The files of one of the sets that stand side by side, each a folder with splits of its own."""
    tables = (name.partition("/") for name in names if name.endswith(SUFFIXES))
    sets = sorted({folder for folder, _, rest in tables if says_split(rest) and not says_split(folder)})
    if subset is not None:
        if subset not in sets:
            raise UserError(f"data.options.subset: {path} has no folder {subset!r}{suggest(subset, sets)}")
        return [name for name in names if name.startswith(f"{subset}/")]
    if len(sets) > 1:
        remedy = f"say which: --set data.options.subset={sets[0]}"
        raise UserError(f"{path}: holds several sets, {', '.join(sets)}; {remedy}")
    return list(names)


def _open(path: Path) -> _File:
    with needs("data.source: parquet needs pyarrow", "pyarrow (the extra parquet)"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    with as_user_error(f"{path}: no whole table", of=(OSError, ValueError)):
        if path.suffix == ".parquet":
            return _File(path, None, pq.ParquetFile(path))
        mapped = pa.memory_map(str(path))
        try:
            return _File(path, pa.ipc.open_stream(mapped).read_all(), None)  # what `datasets` writes
        except pa.ArrowInvalid:
            return _File(path, pa.ipc.open_file(mapped).read_all(), None)


def _bytes_of(column: Any) -> Any:
    """A column of images as bytes; Hugging Face stores each as {bytes, path}, and bytes may be left out."""
    import pyarrow as pa

    # Of a struct only the bytes: the path beside them is a name on the machine that made the table.
    if pa.types.is_struct(column.type):
        kind = column.type.field("bytes").type
        column = pa.chunked_array([chunk.field("bytes") for chunk in column.chunks], type=kind)
    return column


def _column(file: _File, name: str | None, what: str, known: Sequence[str], fits: Callable[[Any], bool]) -> str:
    """The column with this name; without a name the first known one, or the only one of a fitting type."""
    fields = {field.name: field.type for field in file.schema}
    if name is not None:
        if name not in fields:
            raise UserError(f"data.options.{what}: {file.path} has no such column {name!r}{suggest(name, fields)}")
        if not fits(fields[name]):
            raise UserError(f"data.options.{what}: {file.path}: the column {name!r} holds {fields[name]}, no {what}s")
        return name
    fitting = [field for field, kind in fields.items() if fits(kind)]
    for found in (*(each for each in known if each in fitting), *(fitting if len(fitting) == 1 else ())):
        return found
    question = f"which column holds the {what}s? It has {', '.join(fields)}"
    raise UserError(f"{file.path}: {question}; say it with --set data.options.{what}=NAME")


def _is_image(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _is_image(kind.field("bytes").type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_label(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):  # as pandas writes categories; to Python they are plain values
        return _is_label(kind.value_type)
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _texts(labels: Sequence[Any], file: _File, label: str, first: _File) -> list[str]:
    """The labels of a file as texts, in the numbers that the first file has for the same names."""
    texts = list(map(str, labels))
    names, own = (_names(each.schema, label) for each in (first, file))
    if names is None or own is None or own == names:
        return texts
    number_of = {name: text for text, name in names.items()}
    for text in sorted(set(texts)):
        if own.get(text) not in number_of:
            what = f"its label {text} ({own.get(text, 'without a name')}) is no class of {first.path}"
            raise UserError(f"{file.path}: {what}; give both files the same names of classes")
    return [number_of[own[text]] for text in texts]


def _names(schema: Any, label: str) -> dict[str, str] | None:
    """The names of the classes by label, which `datasets` writes into the schema as JSON; None if it didn't."""
    import pyarrow as pa

    is_number = pa.types.is_integer(schema.field(label).type)  # else the column has the names themselves
    try:
        names = parse_json((schema.metadata or {})[b"huggingface"].decode())["info"]["features"][label]["names"]
        if not isinstance(names, list) or len(set(names)) < len(names):
            return None
        return {str(number) if is_number else str(name): str(name) for number, name in enumerate(names)}
    except (ValueError, KeyError, TypeError):
        return None
