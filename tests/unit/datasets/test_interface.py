"""Interfaces of datasets: valid ones, and that exactly their schema leaves, from files of their own folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.config.place import Place
from whale_nebula.datasets.interface import (
    Interface,
    OpenDataset,
    _order_block,
    find_rows,
    open_dataset,
    parse_interface,
    read_interface,
)
from whale_nebula.datasets.schema import (
    LONGEST_TEXT,
    Column,
    check_columns,
    count_bytes,
    decode_columns,
    encode_columns,
    find_max_bytes,
    read_schema,
    write_schema,
)
from whale_nebula.datasets.sources import make_text_column
from whale_nebula.errors import ConfigError, InterfaceError

INTERFACE: dict[str, Any] = {
    "name": "corpus",
    "source": {"csv": "*.csv", "columns": {"age": "int64", "city": "string", "pay": "float64"}},
    "transform": [{"select": ["age"]}],
    "schema": {"age": {"dtype": "int64"}},
    "expires": "2999-01-01",
}


def make_interface(**more: Any) -> Interface:
    return parse_interface(Place({**INTERFACE, **more}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    inside.mkdir()
    rows = [(30, "Ulm", 10.0), (40, "Ulm", 20.0), (50, "Jena", 30.0), (60, "Ulm", 60.0)]
    (inside / "a.csv").write_text("age,city,pay\n" + "".join(f"{a},{c},{p}\n" for a, c, p in rows))
    (tmp_path / "secret.csv").write_text("age,city,pay\n99,Bonn,1\n")
    return inside


# ---------------------------------------------------------------------- the file
@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("name: corpus\nsuorce: {}\n", 2, "unknown key 'suorce'"),
        ("name: ../corpus\n", 1, "is not a valid dataset name"),
        ("name: corpus\nsource: {text: '../*.txt'}\n", 2, "leaves the folder"),
        ("name: corpus\nsource: {text: /etc/*}\n", 2, "leaves the folder"),
        ("name: corpus\nsource: {text: a, csv: b}\n", 2, "one of text, tfrecord, csv"),
        ("name: corpus\nsource: {csv: a}\n", 2, "missing columns"),
        ("name: corpus\nsource: {factory: os.system}\n", 2, "is not a module:function"),
        ("name: corpus\nsource: {text: a, columns: [b]}\n", 2, "unknown key 'columns'"),
        ("name: corpus\nsource: {text: a}\ntransform:\n - tokenize: {}\n", 4, "unknown key 'tokenize'"),
        ("name: corpus\nsource: {text: a}\ntransform:\n - aggregate: {by: a, least: 1}\n", 4, "not an integer"),
        ("name: corpus\nsource: {text: a}\nschema:\n  text: {dtype: string}\n", 4, "is raw text"),
        ("name: corpus\nsource: {text: a}\nschema:\n  x: {dtype: object}\n", 4, "'object' is not a valid value"),
        ("name: corpus\nsource: {text: a}\nschema:\n  x: {dtype: int8, shape: [0]}\n", 4, "not an integer"),
        ("name: corpus\nsource: {text: a}\nschema: {}\n", 3, "missing schema"),
        ("name: corpus\nsource: {text: a}\nschema: {x: {dtype: int8}}\nlimits: {rows: 5}\n", 4, "'rows'"),
        ("name: corpus\nsource: {text: a}\nschema: {x: {dtype: int8}}\nlimits: {rate: 5}\n", 4, "is not a rate"),
        ("name: corpus\nsource: {text: a}\nschema: {x: {dtype: int8}}\nexpires: soon\n", 4, "is not a valid end date"),
        ("name: corpus\nname: other\n", 2, "duplicate key"),
        ("name: !!python/object/apply:os.system [id]\n", 1, "is not valid YAML"),
        ("- a\n", 0, "is not a mapping"),
    ],
)
def test_interface_error_reports_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = tmp_path / "corpus.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_interface(path)
    assert f"corpus.yaml:{line}" in caught.value.where or not line


def test_interface_needs_a_valid_end_date(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a valid end date"):
        make_interface(expires=None)
    for date in ("9999-12-31T23:59:59-12:00", "0001-01-01", "0300-01-01"):
        with pytest.raises(ConfigError, match="is not a valid end date"):
            make_interface(expires=date)
    (tmp_path / "a.yaml").write_text("expires: 2027-03-01T12:00:00+02:00\n")
    assert make_interface(expires="2027-03-01").expires == "2027-03-01T00:00:00Z"
    assert make_interface(expires="2027-03-01T12:00:00+02:00").expires == "2027-03-01T10:00:00Z"


# ---------------------------------------------------------------------- sources
def test_csv_source_gives_selected_columns(folder: Path) -> None:
    opened = open_dataset(make_interface(), folder)
    rows, columns = opened.read(None, 0, 1, 3)
    assert (opened.count, rows, columns["age"].tolist()) == (4, 2, [40, 50])


def test_csv_booleans_are_parsed_from_text(folder: Path) -> None:
    (folder / "t.csv").write_text("member\nTrue\nfalse\n0\n1\n")
    interface = make_interface(
        source={"csv": "t.csv", "columns": {"member": "bool"}}, transform=[], schema={"member": {"dtype": "bool"}}
    )
    assert open_dataset(interface, folder).read(None, 0, 0, 4)[1]["member"].tolist() == [True, False, False, True]
    (folder / "t.csv").write_text("member\nperhaps\n")
    with pytest.raises(InterfaceError, match="contains values that are not bool") as caught:
        open_dataset(interface, folder)
    assert "'perhaps'" in str(caught.value)


def test_text_source_gives_raw_lines_when_schema_allows_raw(folder: Path) -> None:
    (folder / "b.txt").write_bytes(b"one\ntwo\r\n\nfour")
    (folder / "c.txt").write_bytes(b"")
    interface = make_interface(
        source={"text": "*.txt"}, transform=[], schema={"text": {"dtype": "string", "raw": True}}
    )
    assert open_dataset(interface, folder).read(None, 0, 0, 4)[1]["text"].tolist() == [b"one", b"two", b"", b"four"]


def test_tokenise_step_gives_ids_without_text(folder: Path) -> None:
    (folder / "b.txt").write_text("the cat\nthe dog the cat the\n")
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n")
    step = {"tokenise": {"vocabulary": "vocab.txt", "length": 5}}
    interface = make_interface(
        source={"text": "b.txt"}, transform=[step], schema={"ids": {"dtype": "int32", "shape": [5]}}
    )
    columns = open_dataset(interface, folder).read(None, 0, 0, 2)[1]
    assert columns.keys() == {"ids"}
    assert columns["ids"].tolist() == [[2, 5, 6, 3, 0], [2, 5, 1, 5, 6]]


def test_tfrecord_source_is_read_and_truncated_file_refused(folder: Path) -> None:
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as file:
        for number in range(5):
            ids = tf.train.Feature(int64_list=tf.train.Int64List(value=[number, 2 * number]))
            file.write(tf.train.Example(features=tf.train.Features(feature={"ids": ids})).SerializeToString())
    interface = make_interface(
        source={"tfrecord": "*.tfrecord", "features": {"ids": {"dtype": "int64", "shape": [2]}}},
        transform=[],
        schema={"ids": {"dtype": "int64", "shape": [2]}},
    )
    assert open_dataset(interface, folder).read(None, 0, 3, 5)[1]["ids"].tolist() == [[3, 6], [4, 8]]
    data = (folder / "a.tfrecord").read_bytes()
    (folder / "a.tfrecord").write_bytes(data[:-3])
    with pytest.raises(InterfaceError, match="not a TFRecord file, or a truncated one"):
        open_dataset(interface, folder)


def test_parquet_source_without_pyarrow_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InterfaceError, match="cannot be read here") as caught:
        open_dataset(make_interface(source={"parquet": "*.parquet", "columns": ["age"]}), folder)
    assert "pip install pyarrow" in caught.value.mend


def test_factory_source_and_function_step_are_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mycorpus.py").write_text(
        "import numpy as np\n"
        "def open_rows(): return {'x': np.arange(6, dtype='int16')}\n"
        "def double(columns): return {'x': 2 * columns['x']}\n"
        "def drop(columns): return {'x': columns['x'][:1]}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = {"source": {"factory": "mycorpus:open_rows"}, "schema": {"x": {"dtype": "int16"}}}
    opened = open_dataset(make_interface(**fields, transform=[{"function": "mycorpus:double"}]), folder)
    assert opened.read(None, 0, 4, 6)[1]["x"].tolist() == [8, 10]
    with pytest.raises(InterfaceError, match="has no function 'other'"):
        open_dataset(make_interface(**fields, transform=[{"function": "mycorpus:other"}]), folder)
    with pytest.raises(InterfaceError, match="changed the number of rows"):
        open_dataset(make_interface(**fields, transform=[{"function": "mycorpus:drop"}]), folder).read(None, 0, 0, 3)
    with pytest.raises(InterfaceError, match="cannot be imported"):
        open_dataset(make_interface(**{**fields, "source": {"factory": "nosuchmodule:f"}}), folder)


# ---------------------------------------------------------------------- attacks: out of the folder
@pytest.mark.parametrize(
    "pattern", ["../*.csv", "/etc/*", "a/../../*.csv", "~/*", "**/*.csv", "a\0b", "..", "x\\..\\y"]
)
def test_attack_pattern_outside_the_folder(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"leaves the folder|is not a string"):
        make_interface(source={"csv": pattern, "columns": {"age": "int64"}})
    with pytest.raises(ConfigError, match=r"leaves the folder|is not a string"):
        make_interface(transform=[{"tokenise": {"vocabulary": pattern, "length": 4}}])


def test_attack_symbolic_link_outside_the_folder(folder: Path) -> None:
    (folder / "b.csv").symlink_to(folder.parent / "secret.csv")
    with pytest.raises(InterfaceError, match="leaves the folder") as caught:
        open_dataset(make_interface(), folder)
    assert "symbolic link" in caught.value.why


def test_attack_linked_subfolder(folder: Path) -> None:
    (folder / "sub").symlink_to(folder.parent)
    with pytest.raises(InterfaceError, match="leaves the folder") as caught:
        open_dataset(make_interface(source={"csv": "sub/*.csv", "columns": {"age": "int64"}}), folder)
    assert "leads to another folder" in caught.value.why


def test_attack_pipe_instead_of_file(folder: Path) -> None:
    os.mkfifo(folder / "z.csv")
    with pytest.raises(InterfaceError, match="is not a regular file"):
        open_dataset(make_interface(), folder)


# ---------------------------------------------------------------------- attacks: other rows than published
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"age": "int64", "more": "int64"}, "has no column 'more'"),
        ({}, "column"),
        ({"age": "int32"}, "does not match its schema"),
        ({"age": "float64"}, "does not match its schema"),
    ],
)
def test_attack_schema_differs_from_columns(folder: Path, schema: dict[str, str], message: str) -> None:
    columns = {name: {"dtype": dtype} for name, dtype in schema.items()}
    with pytest.raises((InterfaceError, ConfigError), match=message if schema else "missing schema"):
        open_dataset(make_interface(schema=columns), folder)
    with pytest.raises(InterfaceError, match="has a column 'city' that is not in its schema"):
        open_dataset(make_interface(transform=[]), folder)


GOOD_COLUMNS = {"x": np.zeros((2, 3), "int32"), "t": make_text_column([b"abc", b"d"])}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": np.zeros(2, "int8")}, "has a column 'y' that is not in its schema"),
        ({"x": None}, "has no column 'x'"),
        *(
            ({"x": wrong}, "column 'x' does not match its schema")
            for wrong in (np.zeros((2, 3), "int64"), np.zeros((2, 4), "int32"), np.zeros((2, 3, 1), "int32"))
        ),
        *(({"x": wrong}, "column 'x' is not an array of rows") for wrong in ([[1, 2, 3]], np.int32(3), np.array(3))),
        ({"x": make_text_column([b"abc", b"abd"])}, "column 'x' does not match its schema"),
        ({"t": np.array([b"abc", "d"], object)}, "column 't' does not match its schema"),
        ({"t": np.array(["abc", "d"])}, "column 't' does not match its schema"),
        ({"t": make_text_column([b"abc"])}, "the columns have different numbers of rows"),
        ({"t": make_text_column([b"", bytes(LONGEST_TEXT + 1)])}, "a text of column 't' is too long"),
    ],
)
def test_attack_columns_that_do_not_match_the_schema(changes: dict[str, Any], words: str) -> None:
    columns = {name: values for name, values in (GOOD_COLUMNS | changes).items() if values is not None}
    with pytest.raises(InterfaceError, match=words):
        check_columns((Column("x", "int32", (3,)), Column("t", "string")), columns, "corpus")


def test_columns_without_rows_or_with_the_longest_text_match_their_schema() -> None:
    schema = Column("x", "int32", (3,)), Column("t", "string")
    assert check_columns(schema, {name: values[:0] for name, values in GOOD_COLUMNS.items()}, "corpus") == 0
    assert check_columns(schema, GOOD_COLUMNS | {"t": make_text_column([b"", bytes(LONGEST_TEXT)])}, "corpus") == 2


def test_attack_small_groups_are_left_out_of_aggregates(folder: Path) -> None:
    step = {"aggregate": {"by": "city", "least": 3, "mean": ["pay"], "sum": ["age"], "count": "people"}}
    schema = {
        "city": {"dtype": "string", "raw": True}, "pay_mean": {"dtype": "float64"},
        "age_sum": {"dtype": "float64"}, "people": {"dtype": "int64"},
    }  # fmt: skip
    opened = open_dataset(make_interface(transform=[step], schema=schema), folder)
    columns = opened.read(None, 0, 0, 9)[1]
    assert {name: each.tolist() for name, each in columns.items()} == {
        "city": [b"Ulm"], "pay_mean": [30.0], "age_sum": [130.0], "people": [3]
    }  # fmt: skip
    step["aggregate"]["least"] = 4
    assert open_dataset(make_interface(transform=[step], schema=schema), folder).count == 0


# ---------------------------------------------------------------------- bytes, order
def test_columns_survive_encoding_and_damaged_bytes_are_refused() -> None:
    schema = (Column("a", "int16", (2,)), Column("b", "string"), Column("c", "bool"), Column("d", "float64", (1, 2)))
    columns = {
        "a": np.arange(6, dtype="int16").reshape(3, 2), "b": make_text_column([b"x", b"", b"long text"]),
        "c": np.array([True, False, True]), "d": np.ones((3, 1, 2)),
    }  # fmt: skip
    assert check_columns(schema, columns, "x") == 3
    data = b"".join(encode_columns(schema, columns))
    assert len(data) == count_bytes(schema, columns) <= find_max_bytes(schema, 3)
    decoded = decode_columns(schema, 3, memoryview(data))
    assert all(decoded[name].tolist() == each.tolist() for name, each in columns.items())
    assert read_schema(write_schema(schema)) == schema
    for cut in (data[:-1], data + b"x", data[:20]):
        with pytest.raises(ValueError):
            decode_columns(schema, 3, memoryview(cut))
    damaged = bytearray(data)
    damaged[12:16] = b"\xff\xff\xff\x7f"
    with pytest.raises(ValueError, match="a text ends after the data"):
        decode_columns(schema, 3, memoryview(bytes(damaged)))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (None, "no columns"), ([], "no columns"), ([["x", "int8", []]] * 2, "duplicate columns"), ([["x"]], "unpack"),
        ([[3, "int8", []]], "invalid column"), ([["x", "object", []]], "invalid column"),
        ([["x", "int8", 3]], "invalid column"), ([["x", "int8", [-1]]], "invalid column"),
        ([["x", "int8", [0]]], "invalid column"), ([["x", "int8", [1 << 31]]], "invalid column"),
        ([["x", "int8", [1.0]]], "invalid column"), ([["x", "int8", [1] * 9]], "invalid column"),
    ],
)  # fmt: skip
def test_invalid_schema_message_is_refused(message: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_schema(message)


def test_largest_schema_message_is_read() -> None:
    assert read_schema([["x", "int8", [(1 << 31) - 1] + [1] * 7]]) == (Column("x", "int8", ((1 << 31) - 1, *[1] * 7)),)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 1000, 4097])
def test_row_order_is_a_permutation_that_can_be_read_in_parts(count: int) -> None:
    whole = find_rows(count, 5, 2, 0, count).tolist()
    assert sorted(whole) == list(range(count))
    assert [*find_rows(count, 5, 2, 0, 3), *find_rows(count, 5, 2, 3, count)] == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whale_nebula.datasets.interface._BLOCK", 16)
        _order_block.cache_clear()
        parts = [find_rows(count, 5, 2, first, first + 37) for first in range(0, count, 37)]
        assert np.concatenate(parts).tolist() == whole
    _order_block.cache_clear()
    if count > 60:
        assert whole != find_rows(count, 5, 3, 0, count).tolist() != find_rows(count, 6, 3, 0, count).tolist()


def test_row_order_of_a_seed_never_changes() -> None:
    """Other versions must find the same rows for a seed."""
    assert find_rows(10, 7, 0, 0, 10).tolist() == ORDER


ORDER = [7, 8, 6, 2, 1, 0, 9, 4, 5, 3]


def test_edition_changes_with_the_rows(folder: Path) -> None:
    before: OpenDataset = open_dataset(make_interface(), folder)
    with (folder / "a.csv").open("a") as file:
        file.write("70,Ulm,1\n")
    assert open_dataset(make_interface(), folder).edition != before.edition
