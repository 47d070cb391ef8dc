"""Keras models of the examples and benchmarks: BERT, translators, a transformer and a mixture of experts.

Installed as `whale_nebula.models`. Subpackages: `text`, `decoding`, `pretraining`, `understanding` and `recommender`.
"""

from .abnet import ABNet, CausalABNet, MaskedABNet
from .bert import Bert, BertSizes
from .bert_folder import load_bert, load_masked_lm, save_bert
from .experts import SwitchFeedForward
from .masked_lm import masked_lm
from .smoothing import SmoothedCrossentropy
from .transformer import Sizes, transformer
from .translator import Translator

__all__ = [
    "ABNet",
    "Bert",
    "BertSizes",
    "CausalABNet",
    "MaskedABNet",
    "Sizes",
    "SmoothedCrossentropy",
    "SwitchFeedForward",
    "Translator",
    "load_bert",
    "load_masked_lm",
    "masked_lm",
    "save_bert",
    "transformer",
]
