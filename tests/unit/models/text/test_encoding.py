"""A corpus as ids: long sentences are truncated and counted, or refused."""

import logging

import pytest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models.text import SPECIAL, Pairs, Tokenizer, Vocabulary, encode_pairs

PAIRS = Pairs(["a b", "a b c d", "a"], ["a", "b", "c d"])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Vocabulary((*SPECIAL, *"abcd")))


def test_encode_pairs_gives_ids_and_lengths(tokenizer: Tokenizer) -> None:
    encoded = encode_pairs(PAIRS, source=tokenizer, target=tokenizer)
    assert [each.tolist() for each in encoded.lengths] == [[4, 6, 3], [3, 3, 4]]
    assert encoded.source is not None
    assert encoded.source.row(1).tolist() == [2, 5, 6, 7, 8, 3]
    assert (len(encoded), encoded.cut) == (3, 0)


def test_long_sentences_are_truncated_counted_and_logged(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "whale_nebula.models.text"):
        encoded = encode_pairs(PAIRS, source=tokenizer, target=tokenizer, longest=4)
    assert encoded.cut == 1
    assert encoded.source is not None
    assert encoded.source.row(1).tolist() == [2, 5, 6, 3]  # it still has its end
    assert [each.message for each in caplog.records] == [
        "1 of 3 source sentences are longer than 4 tokens: they are truncated"
    ]


def test_too_long_refuse_reports_the_row(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="1 of 3 source sentences are longer than 4 tokens") as caught:
        encode_pairs(PAIRS, source=tokenizer, target=tokenizer, longest=4, too_long="refuse")
    assert caught.value.where == "row 1 has 6 tokens"
    assert "longest=6" in caught.value.mend


def test_longest_can_differ_per_side(tokenizer: Tokenizer) -> None:
    encoded = encode_pairs(PAIRS, source=tokenizer, target=tokenizer, longest={"source": 6, "target": 3})
    assert [each.tolist() for each in encoded.lengths] == [[4, 6, 3], [3, 3, 3]]
    assert encoded.cut == 1


def test_loaded_side_without_tokenizer_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(OptionError, match="the source side is loaded, but has no tokenizer"):
        encode_pairs(PAIRS, target=tokenizer)


@pytest.mark.parametrize("options", [{"too_long": "drop"}, {"longest": 2}])
def test_invalid_encode_pairs_options_are_refused(tokenizer: Tokenizer, options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        encode_pairs(PAIRS, source=tokenizer, target=tokenizer, **options)  # type: ignore[arg-type]
