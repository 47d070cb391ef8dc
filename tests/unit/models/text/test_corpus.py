"""Aligned files: what is read, and one clear sentence for each way in which they can be wrong."""

import gzip
from pathlib import Path

import pytest

from whale_nebula.errors import DataError, NebulaError, OptionError
from whale_nebula.models.text import Pairs, read_folder
from whale_nebula.models.text.lines import read_lines

SPANISH, ENGLISH = "un gato\nun perro\n¿qué?\n", "a cat\na dog\nwhat?\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.es").write_text(SPANISH, "utf-8")
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(ENGLISH.encode()))
    (tmp_path / "val.es").write_text(SPANISH, "utf-8")
    return tmp_path


def refused(folder: Path, split: str = "train", **options: object) -> NebulaError:
    with pytest.raises(NebulaError) as caught:
        read_folder(folder, split, **{"source": "es", "target": "en", **options})
    return caught.value


def test_plain_and_gzipped_files_are_read_in_step(folder: Path) -> None:
    pairs = read_folder(folder, "train", source="es", target="en")
    assert pairs == Pairs(["un gato", "un perro", "¿qué?"], ["a cat", "a dog", "what?"])


def test_either_language_may_be_the_source(folder: Path) -> None:
    assert read_folder(folder, "train", source="en", target="es").of("source")[0] == "a cat"


def test_a_side_that_is_not_asked_for_need_not_be_there(folder: Path) -> None:
    pairs = read_folder(folder, "val", source="es", target="en", sides=["source"])
    assert (pairs.sides, pairs.target, len(pairs)) == (("source",), None, 3)


def test_a_last_line_without_a_line_feed_counts(folder: Path) -> None:
    (folder / "train.es").write_text(SPANISH.rstrip("\n"))
    assert len(read_folder(folder, "train", source="es", target="en")) == 3


@pytest.mark.parametrize("inside", ["\x85", "\u2028", "\x0b", "\r"])
def test_only_a_line_feed_ends_a_line(inside: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(f"one{inside}line\r\nand another".encode())
    assert read_lines(tmp_path / "a.txt") == [f"one{inside}line", "and another"]


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone".encode())
    assert read_lines(tmp_path / "a.txt") == ["one"]


def test_a_missing_folder(folder: Path) -> None:
    assert "there is no folder" in refused(folder / "nowhere").what


def test_a_missing_language_names_those_there_are_and_the_one_meant(folder: Path) -> None:
    error = refused(folder, target="eng")
    assert error.what == "'train' is not there in 'eng', the target side"
    assert (error.why, error.mend) == ("it is there in 'en', 'es'", "did you mean 'en'?")


def test_a_missing_split_names_those_there_are(folder: Path) -> None:
    error = refused(folder, "training")
    assert (error.what, error.mend) == ("there is no split 'training'", "did you mean 'train'?")
    assert "'train', 'val'" in error.why


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    assert "no file of the form SPLIT.LANGUAGE" in refused(tmp_path).why


def test_a_language_that_is_there_twice(folder: Path) -> None:
    (folder / "train.en").write_text(ENGLISH)
    assert "twice, plain and gzipped" in refused(folder).what


def test_files_of_different_lengths_are_counted(folder: Path) -> None:
    (folder / "train.es").write_text(SPANISH + "más\n")
    assert refused(folder).what == "files that are not aligned: train.es has 4 lines and train.en.gz has 3 lines"


def test_an_empty_sentence_is_named_by_its_line(folder: Path) -> None:
    (folder / "train.es").write_text("un gato\n   \n\n")
    error = refused(folder)
    assert isinstance(error, DataError)
    assert error.where.endswith("train.es:2")
    assert "the first of 2" in error.why
    assert 'empty="skip"' in error.mend


def test_empty_sentences_are_skipped_on_both_sides(folder: Path) -> None:
    (folder / "train.es").write_text("un gato\n\n¿qué?\n")
    pairs = read_folder(folder, "train", source="es", target="en", empty="skip")
    assert pairs == Pairs(["un gato", "¿qué?"], ["a cat", "what?"])


def test_one_side_alone_cannot_skip(folder: Path) -> None:
    error = refused(folder, sides=["source"], empty="skip")
    assert isinstance(error, OptionError)
    assert "needs both sides" in error.what


def test_a_file_without_a_line(folder: Path) -> None:
    (folder / "val.es").write_text("")
    assert refused(folder, "val", sides=["source"]).what == "no text: val.es has 0 lines"


def test_bytes_that_are_not_utf8_are_named_by_their_line(folder: Path) -> None:
    (folder / "train.es").write_bytes("un gato\n¿qué?\n".encode("latin1"))
    error = refused(folder)
    assert error.what == "train.es is not UTF-8"
    assert error.where.endswith("train.es:2")
    assert "0xbf" in error.why


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-9], lambda raw: b"no gzip at all", lambda raw: raw[:12] + b"\xff" * 20]
)
def test_a_damaged_gzip_is_said_to_be_one(folder: Path, damage) -> None:  # type: ignore[no-untyped-def]
    whole = (folder / "train.en.gz").read_bytes()
    (folder / "train.en.gz").write_bytes(damage(whole))
    assert refused(folder).what == "train.en.gz is damaged"


@pytest.mark.parametrize("options", [{"sides": ["left"]}, {"empty": "drop"}])
def test_options_that_do_not_exist(folder: Path, options: dict[str, object]) -> None:
    assert isinstance(refused(folder, **options), OptionError)


class TestPairs:
    def test_sides_of_different_lengths_are_no_pairs(self) -> None:
        with pytest.raises(DataError, match="2 source sentences and 1 target sentences"):
            Pairs(["a", "b"], ["c"])

    def test_both_sides_elsewhere_are_nothing(self) -> None:
        with pytest.raises(OptionError, match="both sides are None"):
            Pairs()

    def test_a_side_that_is_not_here_cannot_be_had(self) -> None:
        with pytest.raises(DataError, match="the target side is not here"):
            Pairs(["a"]).of("target")

    def test_the_first_rows_keep_what_is_elsewhere_elsewhere(self) -> None:
        assert Pairs(target=["a", "b"]).first(1) == Pairs(target=["a"])
