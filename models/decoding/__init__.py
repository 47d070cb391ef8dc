"""Searches for the best translation, each one loop in the graph around a step of a model."""

from .beam import Beam, beam_search
from .mask_predict import MaskPredict, mask_predict
from .search_result import Found
from .translation import beamed, mask_predicted, translation

__all__ = ["Beam", "Found", "MaskPredict", "beam_search", "beamed", "mask_predict", "mask_predicted", "translation"]
