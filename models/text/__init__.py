"""Text of several languages: sentence pairs, vocabularies, batches for clusters that each have one side, and BLEU.

The functions, in the order of their use:

* `read_folder`, `generated`, `monolingual`: sentences; `aligned`, `alone`, `choices`: sentences of four languages
* `learn_vocabulary`, `read_vocabulary`, `Tokenizer`: conversion of sentences to ids and back
* `encode_pairs`, `make_order`, `batches`: from ids to a `tf.data.Dataset` for `fit`
* `bleu`, `paired_bootstrap`: the quality of a translation

TensorFlow Text and sacrebleu are imported when they are first needed.
"""

from .bleu import Difference, Score, bleu, paired_bootstrap
from .corpus import Pairs, read_folder
from .encoding import Encoded, Ids, batches, encode_pairs
from .generated import LANGUAGES, Choices, aligned, alone, choices, generated, monolingual
from .order import Order, make_order
from .tokenizer import Tokenizer
from .vocabulary import SPECIAL, Vocabulary, learn_vocabulary, read_vocabulary, write_vocabulary

__all__ = [
    "LANGUAGES",
    "SPECIAL",
    "Choices",
    "Difference",
    "Encoded",
    "Ids",
    "Order",
    "Pairs",
    "Score",
    "Tokenizer",
    "Vocabulary",
    "aligned",
    "alone",
    "batches",
    "bleu",
    "choices",
    "encode_pairs",
    "generated",
    "learn_vocabulary",
    "make_order",
    "monolingual",
    "paired_bootstrap",
    "read_folder",
    "read_vocabulary",
    "write_vocabulary",
]
