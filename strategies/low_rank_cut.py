"""Placement maps that cut a BERT inside sub-layers, as `nb.compress(rank=, basis="svd")` requires."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean

if TYPE_CHECKING:
    from whale_nebula.models import Bert

Place = dict[str, Any]
SUB_LAYERS = ("attention", "inner")


def low_rank_cut(
    bert: Bert,
    layers: int | Sequence[int],
    clusters: Sequence[Any],
    *,
    sub_layer: str = "inner",
    prefix: str = "",
    after: str = "",
) -> Place:
    r"""Create a map for `nb.place` that cuts a BERT inside each of `layers`, after the last product of a sub-layer.

    The norm that follows is on the far side of the cut; the sub-layer's input is added on the near side.

    Args:
        bert: a `Bert`.
        layers: the number of a layer, counted from 0, or several in ascending order.
        clusters: one more than the cuts, in order: names, or `nb.stage(cluster=, name=)` if a cluster occurs twice.
        sub_layer: "inner" cuts after the feed-forward part, "attention" after attention.
        prefix: path of the BERT within a larger model, with a slash at its end.
        after: pattern of the layers that follow the BERT; they are placed on the last cluster.

    Returns:
        a dict from patterns of layer paths to clusters.

    >>> from whale_nebula.models import Bert, BertSizes
    >>> bert = Bert(BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=2, inner=16))
    >>> near, far = low_rank_cut(bert, 0, ["gpu", "npu"])
    >>> near
    '(bert_visible|bert_embedding|bert_attention0)(/.*)?|bert_inner0/(?!norm).*'
    >>> far
    'bert_inner0/norm|(bert_attention1|bert_inner1)(/.*)?'
    """
    cuts: list[Any] = list(layers) if isinstance(layers, (list, tuple, range)) else [layers]
    _check(bert, cuts, clusters, sub_layer)
    names = [bert.visible.name, bert.embedding.name, *(each.name for pair in bert.sub_layers for each in pair)]
    begins_with_norm = bert.ending is not None  # the next layer then reads the product
    names += [bert.ending.name] if bert.ending is not None else []
    patterns, begin, norm = [], 0, ""
    for cut in cuts:
        at = 2 + 2 * cut + SUB_LAYERS.index(sub_layer)
        here = re.escape(prefix + names[at])
        whole = _match_layers(prefix, names[begin : at + begins_with_norm])
        patterns.append([norm, whole, "" if begins_with_norm else f"{here}/(?!norm).*"])
        begin, norm = at + 1, "" if begins_with_norm else f"{here}/norm"
    patterns.append([norm, _match_layers(prefix, names[begin:]), after])
    return {"|".join(filter(None, each)): cluster for each, cluster in zip(patterns, clusters, strict=True)}


def _check(bert: Bert, cuts: Sequence[int], clusters: Sequence[Any], sub_layer: str) -> None:
    from whale_nebula.models import Bert  # callers have imported it

    if not isinstance(bert, Bert):
        why = "layers are found by the names that Bert gives them"
        raise OptionError(
            f"{type(bert).__name__} is not a Bert", why=why, mend="nb.place(model, {PATTERN: CLUSTER, ...})"
        )
    count = bert.sizes.layers
    if not cuts or any(type(each) is not int or not 0 <= each < count for each in cuts) or sorted(set(cuts)) != cuts:
        raise OptionError(
            f"layers={cuts!r} is not valid for a BERT with {count} layers",
            why="layers are counted from 0, and must be distinct and in ascending order",
            mend=f"layers={count - 1}",
        )
    if sub_layer not in SUB_LAYERS:
        raise OptionError(f"no sub-layer is called {sub_layer!r}", mend=did_you_mean(sub_layer, SUB_LAYERS))
    if isinstance(clusters, str) or len(clusters) != len(cuts) + 1:
        raise OptionError(
            f"clusters={clusters!r} is not a list of {len(cuts) + 1} clusters",
            why="n cuts divide the model into n + 1 parts",
            mend='["gpu", "npu"]',
        )


def _match_layers(prefix: str, names: Sequence[str]) -> str:
    """A pattern that matches these layers and everything inside them."""
    return f"({'|'.join(re.escape(prefix + name) for name in names)})(/.*)?" if names else ""
