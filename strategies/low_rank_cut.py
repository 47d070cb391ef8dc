"""Cut a BERT at the linear layer that ends a sub-layer, as `nb.compress(rank=, basis="svd")` needs it."""

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
    bert: Bert, layer: int, clusters: Sequence[Any], *, sub_layer: str = "inner", prefix: str = "", after: str = ""
) -> Place:
    r"""A `place` map that cuts a BERT inside layer `layer`, right after the product that ends a sub-layer.

    The norm that follows is on the far side; the sub-layer's input is added on the near one.
    `clusters` are the near and the far one, by name or as `nb.stage(...)`. `sub_layer` is "inner", the feed-forward
    part, or "attention". Within a larger model `prefix` is the path of the BERT with a slash at its end, and `after` a
    pattern of the layers that follow the BERT on the far side.

    >>> from whale_nebula.models import Bert, BertSizes
    >>> bert = Bert(BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=2, inner=16))
    >>> near, far = low_rank_cut(bert, 0, ["gpu", "npu"])
    >>> near
    '(bert_visible|bert_embedding|bert_attention0)(/.*)?|bert_inner0/(?!norm).*'
    >>> far
    '(bert_attention1|bert_inner1)(/.*)?|bert_inner0/norm'
    """
    if not 0 <= layer < bert.sizes.layers:
        raise OptionError(
            f"layer={layer!r} of a BERT with {bert.sizes.layers} layers", why="they are counted from 0", mend="layer=0"
        )
    if sub_layer not in SUB_LAYERS:
        raise OptionError(f"no sub-layer is called {sub_layer!r}", mend=did_you_mean(sub_layer, SUB_LAYERS))
    if len(clusters) != 2:
        raise OptionError(f"clusters={clusters!r}", why="a cut has two sides", mend='["gpu", "npu"]')
    names = [each.name for pair in bert.sub_layers for each in pair]
    place = 2 * layer + SUB_LAYERS.index(sub_layer)
    before, at, follow = names[:place], names[place], names[place + 1 :]
    before = [bert.visible.name, bert.embedding.name, *before]
    norm_is_far = bert.ending is None  # a pre-normalised sub-layer begins with its norm
    if bert.ending is not None:
        follow, before, at = [*follow, bert.ending.name], [*before, at], ""
    here = re.escape(prefix + at)
    near = [_whole(prefix, before), f"{here}/(?!norm).*" if norm_is_far else ""]
    far = [_whole(prefix, follow), f"{here}/norm" if norm_is_far else "", after]
    return {"|".join(filter(None, each)): home for each, home in zip((near, far), clusters, strict=True)}


def _whole(prefix: str, names: Sequence[str]) -> str:
    """A pattern of these layers and everything inside them."""
    return f"({'|'.join(re.escape(prefix + name) for name in names)})(/.*)?" if names else ""
