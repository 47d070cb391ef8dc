"""Pretraining of a discriminator by generators of several languages, with data sent in one direction only.

* `Corpus`, `encode_alone`, `encode_with_pivot`, `mix_families`: from text to batches, with languages mixed by
  temperature
* `Corruption`, `Objectives`, `Discriminator`, `Pretraining`: the training step (MRTD, TRTD, CLM; one generator or
  several)
* `make_adam`: Adam with a learning rate that rises and falls linearly
* `choice_model`, `tune_choice`, `choice_accuracy`: evaluation of the discriminator on languages without fine-tuning
"""

from .choosing import choice_accuracy, choice_model, encode_choices, tune_choice
from .corpus import Corpus, check_families, encode_alone, encode_with_pivot
from .corruption import Corrupted, Corruption, corrupt, fill_in, hide_tokens, put_back
from .discriminator import Discriminator
from .mixing import Mixture, deal_rows, encode_pairs_in_rows, encode_sentences, mix_families, shares_by_temperature
from .training import (
    DISCRIMINATOR,
    Objectives,
    Pretraining,
    RiseAndFall,
    correction_loss,
    detection_loss,
    guess_loss,
    make_adam,
)

__all__ = [
    "DISCRIMINATOR",
    "Corpus",
    "Corrupted",
    "Corruption",
    "Discriminator",
    "Mixture",
    "Objectives",
    "Pretraining",
    "RiseAndFall",
    "check_families",
    "choice_accuracy",
    "choice_model",
    "correction_loss",
    "corrupt",
    "deal_rows",
    "detection_loss",
    "encode_alone",
    "encode_choices",
    "encode_pairs_in_rows",
    "encode_sentences",
    "encode_with_pivot",
    "fill_in",
    "guess_loss",
    "hide_tokens",
    "make_adam",
    "mix_families",
    "put_back",
    "shares_by_temperature",
    "tune_choice",
]
