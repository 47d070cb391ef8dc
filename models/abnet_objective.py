"""ABNet by what it is trained for: one name for both kinds."""

from __future__ import annotations

from typing import Any, Literal

from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean

from .abnet_causal import CausalABNet
from .abnet_cmlm import MaskedABNet
from .bert import Bert
from .masked_lm import MaskedLm

Objective = Literal["causal", "cmlm"]
_KINDS: dict[str, type[CausalABNet] | type[MaskedABNet]] = {"causal": CausalABNet, "cmlm": MaskedABNet}


def ABNet(
    source: Bert, target: Bert | MaskedLm, *, objective: Objective = "causal", **options: Any
) -> CausalABNet | MaskedABNet:
    """A `CausalABNet`, which writes from left to right, or a `MaskedABNet`, which fills in hidden words.

    `objective` says which; everything else goes to it.

    >>> from .bert import BertSizes
    >>> sizes = BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16)
    >>> model = ABNet(Bert(sizes, name="es"), Bert(sizes, name="en"), objective="cmlm", inner=4)
    >>> type(model).__name__, model.searched_by.__name__
    ('MaskedABNet', 'MaskPredict')
    """
    if objective not in _KINDS:
        raise OptionError(f"objective={objective!r} is not known", mend=did_you_mean(str(objective), list(_KINDS)))
    return _KINDS[objective](source, target, **options)
