"""Vocabularies: learned deterministically, read and written in BERT's format, and refused if invalid."""

from pathlib import Path

import pytest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models.text import (
    SPECIAL,
    Vocabulary,
    generated,
    learn_vocabulary,
    read_vocabulary,
    write_vocabulary,
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return list(generated("train", 150).of("source"))


@pytest.fixture(scope="module")
def learned(lines: list[str]) -> Vocabulary:
    return learn_vocabulary(lines, 400)


def test_special_tokens_come_first_and_are_found_by_name(learned: Vocabulary) -> None:
    assert learned.tokens[:5] == SPECIAL
    assert [learned.pad, learned.unknown, learned.start, learned.end, learned.mask] == [0, 1, 2, 3, 4]


def test_it_nearly_fills_the_size_and_never_more(learned: Vocabulary) -> None:
    assert 0.7 * 400 < len(learned.tokens) <= 400


def test_it_can_be_filled_up_to_a_size_that_all_know_beforehand(lines: list[str], learned: Vocabulary) -> None:
    filled = learn_vocabulary(lines, 400, fill=True)
    assert len(filled) == 400
    assert filled.tokens[: len(learned)] == learned.tokens
    assert set(filled.tokens[len(learned) :]) == {f"[unused{number}]" for number in range(400 - len(learned))}


def test_frequent_words_are_whole_and_all_letters_are_there_in_lower_case_with_accents(learned: Vocabulary) -> None:
    assert {"el", "las", "cuesta", "está", "¿", "##a", "z", "ñ"} <= set(learned.tokens) and learned.accented
    assert not any(token != token.lower() for token in learned.tokens[5:])


def test_accents_can_be_stripped(lines: list[str]) -> None:
    plain = learn_vocabulary(lines, 400, accents=False)
    assert "esta" in plain.tokens and not plain.accented


@pytest.mark.parametrize(
    ("token", "accented"), [("é", True), ("й", True), ("\u0301", False), ("ø", False), ("한", False)]
)
def test_only_letters_that_lose_something_are_accented(token: str, accented: bool) -> None:
    assert Vocabulary((*SPECIAL, token)).accented is accented


@pytest.mark.parametrize("nothing", [[], ["", "  "]])
def test_no_text_is_refused(nothing: list[str]) -> None:
    with pytest.raises(DataError, match="no text to learn"):
        learn_vocabulary(nothing, 100)


def test_a_size_that_does_not_hold_the_letters_is_refused_with_one_that_does(lines: list[str]) -> None:
    with pytest.raises(OptionError, match="size=30 is too small for the letters") as caught:
        learn_vocabulary(lines, 30)
    enough = int(caught.value.mend.partition("=")[2].partition(",")[0])
    assert len(learn_vocabulary(lines, enough)) <= enough


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (("[PAD]", "[UNK]", "cat"), r"lacks '\[CLS\]', '\[SEP\]', '\[MASK\]'"),
        ((*SPECIAL[1:], SPECIAL[0]), r"the first token of the vocabulary is '\[UNK\]'"),
        ((*SPECIAL, "cat", "dog", "cat"), "contains 'cat' twice"),
        ((), "lacks"),
    ],
)
def test_a_vocabulary_that_is_wrong_is_refused(tokens: tuple[str, ...], said: str) -> None:
    with pytest.raises(DataError, match=said):
        Vocabulary(tokens)


def test_a_token_that_is_not_there_has_no_id() -> None:
    with pytest.raises(DataError, match="no token 'cat'"):
        Vocabulary(SPECIAL).id("cat")


class TestFiles:
    def test_it_is_one_token_a_line(self, tmp_path: Path) -> None:
        write_vocabulary(Vocabulary((*SPECIAL, "niño")), tmp_path / "vocab.txt")
        assert (tmp_path / "vocab.txt").read_bytes() == "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nniño\n".encode()

    def test_tokens_of_white_space_are_kept_apart(self, tmp_path: Path) -> None:
        odd = Vocabulary((*SPECIAL, "\u2028", "\u3000", "\x85"))
        write_vocabulary(odd, tmp_path)
        assert read_vocabulary(tmp_path) == odd

    def test_lines_may_end_as_on_windows(self, tmp_path: Path) -> None:
        (tmp_path / "vocab.txt").write_bytes("\r\n".join([*SPECIAL, "cat"]).encode())
        assert read_vocabulary(tmp_path).tokens == (*SPECIAL, "cat")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no vocabulary at"):
            read_vocabulary(tmp_path)

    def test_what_is_wrong_with_a_file_names_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "vocab.txt").write_text("cat\ndog\n")
        with pytest.raises(DataError, match="lacks") as caught:
            read_vocabulary(tmp_path)
        assert caught.value.where == str(tmp_path / "vocab.txt")


class TestFit:
    def test_the_models_rows_must_be_as_many(self) -> None:
        Vocabulary(SPECIAL).check_fits(5)
        Vocabulary(SPECIAL).check_fits(8, padded=True)
        with pytest.raises(DataError):
            Vocabulary(SPECIAL).check_fits(4, padded=True)
        for rows in (4, 6):
            with pytest.raises(DataError, match=f"5 tokens does not match a model with {rows}") as caught:
                Vocabulary(SPECIAL).check_fits(rows)
            assert "vocabulary=5" in caught.value.mend
