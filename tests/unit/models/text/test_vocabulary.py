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
def learned_vocabulary(lines: list[str]) -> Vocabulary:
    return learn_vocabulary(lines, 400)


def test_special_tokens_come_first(learned_vocabulary: Vocabulary) -> None:
    assert learned_vocabulary.tokens[:5] == SPECIAL
    assert [
        learned_vocabulary.pad,
        learned_vocabulary.unknown,
        learned_vocabulary.start,
        learned_vocabulary.end,
        learned_vocabulary.mask,
    ] == [0, 1, 2, 3, 4]


def test_learned_vocabulary_nearly_fills_its_size(learned_vocabulary: Vocabulary) -> None:
    assert 0.7 * 400 < len(learned_vocabulary.tokens) <= 400


def test_fill_pads_the_vocabulary_to_its_size(lines: list[str], learned_vocabulary: Vocabulary) -> None:
    filled = learn_vocabulary(lines, 400, fill=True)
    assert len(filled) == 400
    assert filled.tokens[: len(learned_vocabulary)] == learned_vocabulary.tokens
    assert set(filled.tokens[len(learned_vocabulary) :]) == {
        f"[unused{number}]" for number in range(400 - len(learned_vocabulary))
    }


def test_learned_tokens_are_lower_case_words_and_letters(learned_vocabulary: Vocabulary) -> None:
    assert {"el", "las", "cuesta", "está", "¿", "##a", "z", "ñ"} <= set(
        learned_vocabulary.tokens
    ) and learned_vocabulary.accented
    assert not any(token != token.lower() for token in learned_vocabulary.tokens[5:])


def test_accents_can_be_stripped_when_learning(lines: list[str]) -> None:
    plain = learn_vocabulary(lines, 400, accents=False)
    assert "esta" in plain.tokens and not plain.accented


@pytest.mark.parametrize(
    ("token", "accented"), [("é", True), ("й", True), ("\u0301", False), ("ø", False), ("한", False)]
)
def test_accented_is_true_for_strippable_letters(token: str, accented: bool) -> None:
    assert Vocabulary((*SPECIAL, token)).accented is accented


@pytest.mark.parametrize("empty_lines", [[], ["", "  "]])
def test_empty_text_is_refused(empty_lines: list[str]) -> None:
    with pytest.raises(DataError, match="no text to learn"):
        learn_vocabulary(empty_lines, 100)


def test_too_small_vocabulary_size_is_refused_with_the_minimum(lines: list[str]) -> None:
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
def test_invalid_vocabulary_is_refused(tokens: tuple[str, ...], said: str) -> None:
    with pytest.raises(DataError, match=said):
        Vocabulary(tokens)


def test_unknown_token_has_no_id() -> None:
    with pytest.raises(DataError, match="no token 'cat'"):
        Vocabulary(SPECIAL).id("cat")


class TestFiles:
    def test_vocabulary_file_has_one_token_per_line(self, tmp_path: Path) -> None:
        write_vocabulary(Vocabulary((*SPECIAL, "niño")), tmp_path / "vocab.txt")
        assert (tmp_path / "vocab.txt").read_bytes() == "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nniño\n".encode()

    def test_whitespace_tokens_round_trip(self, tmp_path: Path) -> None:
        odd = Vocabulary((*SPECIAL, "\u2028", "\u3000", "\x85"))
        write_vocabulary(odd, tmp_path)
        assert read_vocabulary(tmp_path) == odd

    def test_windows_line_endings_are_accepted(self, tmp_path: Path) -> None:
        (tmp_path / "vocab.txt").write_bytes("\r\n".join([*SPECIAL, "cat"]).encode())
        assert read_vocabulary(tmp_path).tokens == (*SPECIAL, "cat")

    def test_missing_vocabulary_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no vocabulary at"):
            read_vocabulary(tmp_path)

    def test_invalid_vocabulary_file_error_names_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "vocab.txt").write_text("cat\ndog\n")
        with pytest.raises(DataError, match="lacks") as caught:
            read_vocabulary(tmp_path)
        assert caught.value.where == str(tmp_path / "vocab.txt")


class TestFit:
    def test_check_fits_compares_vocabulary_and_model_rows(self) -> None:
        Vocabulary(SPECIAL).check_fits(5)
        Vocabulary(SPECIAL).check_fits(8, padded=True)
        with pytest.raises(DataError):
            Vocabulary(SPECIAL).check_fits(4, padded=True)
        for rows in (4, 6):
            with pytest.raises(DataError, match=f"5 tokens does not match a model with {rows}") as caught:
                Vocabulary(SPECIAL).check_fits(rows)
            assert "vocabulary=5" in caught.value.mend
