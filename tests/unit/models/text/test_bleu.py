"""BLEU: sacrebleu's score and signature, and its bootstrap of differences."""

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models.text import bleu, generated, paired_bootstrap

REFERENCES = list(generated("test", 120).of("target"))


def drop_words(texts: list[str], share: float) -> list[str]:
    """Some words are left out of some sentences."""
    random = np.random.default_rng(1)
    return [" ".join(word for word in text.split() if random.random() > share) for text in texts]


@pytest.mark.parametrize(
    "hypotheses", [REFERENCES, drop_words(REFERENCES, 0.1), drop_words(REFERENCES, 0.6), ["no"] * 120]
)
def test_bleu_equals_sacrebleu(hypotheses: list[str]) -> None:
    metric = BLEU(lowercase=True)
    expected = metric.corpus_score(hypotheses, [REFERENCES])
    found = bleu(hypotheses, REFERENCES)
    assert found.value == pytest.approx(expected.score, abs=1e-12)
    assert found.precisions == pytest.approx(expected.precisions)
    assert (found.brevity, found.words, found.reference_words) == (expected.bp, expected.sys_len, expected.ref_len)
    assert found.signature == str(metric.get_signature())


def test_bleu_ignores_case_but_not_accents_and_punctuation() -> None:
    assert bleu([each.upper() for each in REFERENCES], REFERENCES).value == pytest.approx(100.0)
    assert bleu(["¿dónde está el gato?"], ["¿donde esta el gato?"]).value < 60
    assert bleu([each.rstrip(".") for each in REFERENCES], REFERENCES).value < 95


class TestDifference:
    better, poor = drop_words(REFERENCES, 0.1), drop_words(REFERENCES, 0.3)

    def test_clear_difference_is_significant(self) -> None:
        found = paired_bootstrap(self.poor, self.better, REFERENCES, samples=200)
        assert found.delta == found.b.value - found.a.value > 5
        assert 0 < found.low < found.delta < found.high
        assert found.p_value < 0.02

    def test_equal_texts_have_no_difference(self) -> None:
        found = paired_bootstrap(self.poor, self.poor, REFERENCES, samples=50)
        assert str(found) == "+0.00 BLEU [+0.00, +0.00], p=1.000"

    def test_bootstrap_is_deterministic_per_seed(self) -> None:
        runs = [paired_bootstrap(self.poor, self.better, REFERENCES, samples=20, seed=seed) for seed in (1, 1, 2)]
        assert runs[0] == runs[1] != runs[2]

    def test_p_value_is_close_to_sacrebleu(self) -> None:
        nearly = [*self.poor[:100], *REFERENCES[100:104], *self.poor[104:]]
        systems = [("a", self.poor), ("b", nearly)]
        metrics = {"BLEU": BLEU(lowercase=True, references=[REFERENCES])}
        _, scores = PairedTest(systems, metrics, None, test_type="bs", n_samples=500)()
        found = paired_bootstrap(self.poor, nearly, REFERENCES, samples=500)
        assert found.p_value == pytest.approx(scores["BLEU"][1].p_value, abs=0.05)


def test_mismatched_texts_are_refused() -> None:
    with pytest.raises(DataError, match="1 sentences of 'hypotheses' and 2 references"):
        bleu(["a"], ["a", "b"])
    with pytest.raises(DataError, match="2 sentences of 'b' and 1 references"):
        paired_bootstrap(["a"], ["a", "b"], ["a"])
    with pytest.raises(DataError, match="'hypotheses'"):
        bleu("a", ["a"])  # a string is not a list of sentences
    with pytest.raises(DataError, match="needs references"):
        bleu([], [])
    with pytest.raises(OptionError, match="samples=0"):
        paired_bootstrap(["a"], ["a"], ["a"], samples=0)
