"""Aligned files: reading, and one clear message for each fault."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models.text import Pairs, read_folder
from whale_nebula.models.text.corpus import read_lines

SPANISH, ENGLISH = "un gato\nun perro\n¿qué?\n", "a cat\na dog\nwhat?\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.es").write_text(SPANISH, "utf-8")
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(ENGLISH.encode()))
    (tmp_path / "val.es").write_text(SPANISH, "utf-8")
    return tmp_path


def test_plain_and_gzipped_files_are_read_in_parallel(folder: Path) -> None:
    pairs = read_folder(folder, "train", source="es", target="en")
    assert pairs == Pairs(["un gato", "un perro", "¿qué?"], ["a cat", "a dog", "what?"])


def test_read_folder_reads_either_language_as_source(folder: Path) -> None:
    assert read_folder(folder, "train", source="en", target="es").of("source")[0] == "a cat"


def test_unrequested_side_may_be_missing(folder: Path) -> None:
    pairs = read_folder(folder, "val", source="es", target="en", sides=["source"])
    assert (pairs.sides, pairs.target, len(pairs)) == (("source",), None, 3)


def test_last_line_without_line_feed_is_read(folder: Path) -> None:
    (folder / "train.es").write_text(SPANISH.rstrip("\n"))
    assert len(read_folder(folder, "train", source="es", target="en")) == 3


@pytest.mark.parametrize("inside", ["\x85", "\u2028", "\x0b", "\r"])
def test_only_line_feed_ends_a_line(inside: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(f"one{inside}line\r\nand another".encode())
    assert read_lines(tmp_path / "a.txt") == [f"one{inside}line", "and another"]


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone".encode())
    assert read_lines(tmp_path / "a.txt") == ["one"]


def write_file(name: str, data: bytes | str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


MORE, EMPTY = write_file("train.es", SPANISH + "más\n"), write_file("train.es", "un gato\n   \n\n")
DAMAGED = "train.en.gz is damaged"
WRONG: dict[str, tuple[Callable[[Path], object], dict[str, object], tuple[str, str, str, str]]] = {
    "a missing language": (
        write_file("x", ""),
        {"target": "eng"},
        ("split 'train' does not exist in 'eng', the target side", "", "it exists in 'en', 'es'", "did you mean 'en'?"),
    ),
    "a missing split": (
        write_file("x", ""),
        {"split": "training"},
        ("there is no split 'training'", "", "'train', 'val'", "did you mean 'train'?"),
    ),
    "a language that is there twice": (write_file("train.en", ENGLISH), {}, ("twice, plain and gzipped", "", "", "")),
    "files of different lengths": (
        MORE,
        {},
        ("files are not aligned: train.es has 4 lines and train.en.gz has 3 lines", "", "", ""),
    ),
    "an empty sentence": (EMPTY, {}, ("", "train.es:2", "the first of 2", 'empty="skip"')),
    "one side alone cannot skip": (EMPTY, {"sides": ["source"], "empty": "skip"}, ("requires both sides", "", "", "")),
    "a file without a line": (
        write_file("val.es", ""),
        {"split": "val", "sides": ["source"]},
        ("no text: val.es has 0 lines", "", "", ""),
    ),
    "bytes that are not UTF-8": (
        write_file("train.es", "un gato\n¿qué?\n".encode("latin1")),
        {},
        ("train.es is not UTF-8", "train.es:2", "0xbf", ""),
    ),
    "a gzip that is cut": (write_file("train.en.gz", gzip.compress(ENGLISH.encode())[:-9]), {}, (DAMAGED, "", "", "")),
    "no gzip": (write_file("train.en.gz", b"no gzip at all"), {}, (DAMAGED, "", "", "")),
    "a side that does not exist": (write_file("x", ""), {"sides": ["left"]}, ("", "", "", "")),
    "an option that does not exist": (write_file("x", ""), {"empty": "drop"}, ("", "", "", "")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_corpus_fault_is_reported_with_place_and_fix(folder: Path, wrong: str) -> None:
    damage, options, parts = WRONG[wrong]
    damage(folder)
    with pytest.raises((DataError, OptionError)) as caught:
        read_folder(folder, **{"split": "train", "source": "es", "target": "en", **options})  # type: ignore[arg-type]
    error = caught.value
    assert all(part in said for part, said in zip(parts, (error.what, error.where, error.why, error.mend), strict=True))


def test_missing_or_unrelated_folder_is_refused(tmp_path: Path) -> None:
    for folder, said in (
        (tmp_path / "nowhere", "there is no folder"),
        (tmp_path, "no file of the form SPLIT.LANGUAGE"),
    ):
        with pytest.raises(DataError) as caught:
            read_folder(folder, "train", source="es", target="en")
        assert said in str(caught.value)


def test_empty_skip_drops_the_pair(folder: Path) -> None:
    (folder / "train.es").write_text("un gato\n\n¿qué?\n")
    pairs = read_folder(folder, "train", source="es", target="en", empty="skip")
    assert pairs == Pairs(["un gato", "¿qué?"], ["a cat", "what?"])


class TestPairs:
    def test_sides_of_different_lengths_are_refused(self) -> None:
        with pytest.raises(DataError, match="2 source sentences and 1 target sentences"):
            Pairs(["a", "b"], ["c"])

    def test_pairs_without_any_side_are_refused(self) -> None:
        with pytest.raises(OptionError, match="both sides of the pairs are None"):
            Pairs()

    def test_reading_an_absent_side_is_refused(self) -> None:
        with pytest.raises(DataError, match="the target side was not loaded"):
            Pairs(["a"]).of("target")

    def test_first_keeps_an_absent_side_absent(self) -> None:
        assert Pairs(target=["a", "b"]).first(1) == Pairs(target=["a"])
