"""The tokenizer: to ids and back, eagerly and in graphs, and detokenization."""

import pytest
import tensorflow as tf

from whale_nebula.models.text import SPECIAL, Pairs, Tokenizer, Vocabulary, generated, learn_vocabulary
from whale_nebula.models.text.tokenizer import attach_marks

WORDS = (*SPECIAL, "the", "cat", "##s", "café", "cafe", "[", "]", "sep", "mask", ".", "é", "##é")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Vocabulary(WORDS))


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return generated("val", 120)


def ids(tokenizer: Tokenizer, *words: str) -> list[int]:
    return [tokenizer.vocabulary.id(word) for word in words]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The CATS.", "the cat ##s ."),
        ("the xylophone", "the [UNK]"),
        ("the [SEP] [MASK]", "the [ sep ] [ mask ]"),  # special tokens cannot be smuggled in
        ("CAFÉ", "café"),
        ("cafe\u0301", "café"),
    ],
)
def test_encoded_sentence_has_start_and_end_tokens(tokenizer: Tokenizer, text: str, tokens: str) -> None:
    encoded = tokenizer.encode([text])
    assert encoded.dtype == tf.int32
    assert encoded.to_list() == [ids(tokenizer, "[CLS]", *tokens.split(), "[SEP]")]


def test_special_ids_are_those_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    found = (tokenizer.size, tokenizer.pad, tokenizer.unknown, tokenizer.start, tokenizer.end, tokenizer.mask)
    assert found == (len(WORDS), 0, 1, 2, 3, 4)


def test_accents_are_stripped_by_vocabulary_or_option(tokenizer: Tokenizer) -> None:
    plain = Tokenizer(Vocabulary((*SPECIAL, "cafe")))
    assert plain.encode(["CAFÉ"]).to_list()[0][1:-1] == [5]
    stripping = Tokenizer(Vocabulary(WORDS), accents=False)
    assert stripping.encode(["Café"]).to_list()[0][1:-1] == ids(tokenizer, "cafe")


def test_decode_stops_at_end_and_drops_special_tokens(tokenizer: Tokenizer) -> None:
    row = ids(tokenizer, "[CLS]", "the", "[MASK]", "cat", "##s", ".", "[SEP]", "the", "[PAD]")
    assert tokenizer.sentences([row]) == ["the cats."]


def test_decode_accepts_padded_and_ragged_rows(tokenizer: Tokenizer) -> None:
    the, cat = ids(tokenizer, "the", "cat")
    assert tokenizer.sentences(tf.ragged.constant([[the, cat], [cat]], dtype=tf.int32)) == ["the cat", "cat"]
    assert tokenizer.sentences(tf.constant([[the, 0], [0, 0]], tf.int64)) == ["the", ""]


def test_encode_and_decode_work_in_a_dataset(tokenizer: Tokenizer) -> None:
    lines = ["the cats.", "café"]
    dataset = tf.data.Dataset.from_tensor_slices(lines).batch(2).map(lambda text: tokenizer.encode(text))
    (there,) = dataset
    (back,) = dataset.map(lambda ids: tokenizer.decode(ids))
    assert there.to_list() == tokenizer.encode(lines).to_list()
    assert [each.decode() for each in back.numpy()] == lines


@pytest.mark.parametrize("side", ["source", pytest.param("target", marks=pytest.mark.grid)])
def test_generated_text_round_trips(pairs: Pairs, side: str) -> None:
    lines = list(pairs.of(side))  # type: ignore[arg-type]
    tokenizer = Tokenizer(learn_vocabulary(lines, 900))
    assert tokenizer.sentences(tokenizer.encode(lines)) == [line.lower() for line in lines]


@pytest.mark.parametrize(
    "text",
    [
        "a well-known, red-haired man's dog doesn't bark!",
        "it costs $5 (or 25.50 euros); at 10:30, 1,000 people came.",
        "¿dónde está? ¡aquí! «no»",
        "l'homme qu'il aime s'appelle d'artagnan, aujourd'hui.",
        'he says "come in" and "go out".',
        "at three o'clock the boys' books and/or pens",
        "der „große“ hund, the “big” dog.",
        "cuesta 25,50 euros; in 1999, 3 of them",
        "obst- und gemüse, two- or three-day trips",
        "wait… 50% of 8",
    ],
)
def test_punctuation_is_attached_when_detokenizing(text: str) -> None:
    marks = r"([\pP$%])"
    apart = tf.strings.strip(tf.strings.regex_replace(tf.strings.regex_replace([text], marks, r" \1 "), " +", " "))
    assert attach_marks(apart).numpy()[0].decode() == text
