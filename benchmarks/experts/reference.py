"""The dense reference of a layer of experts: token by token, in float64."""

from __future__ import annotations

import math

import numpy as np

from whale_nebula.models import SwitchFeedForward


def compute_dense(layer: SwitchFeedForward, x: np.ndarray) -> tuple[np.ndarray, float]:
    """The output of the best experts with capacity for each token, first choices first; and the share of dropped
    tokens.
    """
    names = ("gate", "inner", "inner_bias", "outer", "outer_bias")
    gate, inner, inner_bias, outer, outer_bias = (np.asarray(getattr(layer, name), np.float64) for name in names)
    groups = np.asarray(x, np.float64).reshape(layer.row_groups or 1, -1, x.shape[-1])
    capacity = max(math.ceil(groups.shape[1] * layer.k * layer.capacity_factor / layer.experts), layer.min_capacity)
    found, dropped = np.zeros_like(groups), 0
    for tokens, made in zip(groups, found, strict=True):
        chances = np.exp(tokens @ gate)
        chances /= chances.sum(-1, keepdims=True)
        best = np.argsort(-chances, -1)[:, : layer.k]
        weights = np.take_along_axis(chances, best, -1)
        weights = weights / weights.sum(-1, keepdims=True) if layer.k > 1 else weights
        room = [capacity] * layer.experts
        for choice in range(layer.k):
            for number, token in enumerate(tokens):
                expert = best[number, choice]
                dropped += not room[expert]
                if room[expert]:
                    room[expert] -= 1
                    hidden = np.maximum(token @ inner[expert] + inner_bias[expert], 0)
                    made[number] += weights[number, choice] * (hidden @ outer[expert] + outer_bias[expert])
    return found.reshape(x.shape), dropped / (groups.shape[0] * groups.shape[1] * layer.k)
