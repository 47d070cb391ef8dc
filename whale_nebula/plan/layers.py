"""Which layer an op belongs to, told by its name.

TensorFlow names an op after the name scopes in which it was made, and Keras opens one for each layer. What
differentiation made is called after the op that it differentiates.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

DEPTH = 3
"""Layers inside layers are told apart so deep."""
LOSS = "compile_loss"
"""The scope in which Keras computes the loss."""
_OURS = re.compile(r"nebula(_\d+)?")
_AGAIN = re.compile(r"_\d+$")
_OPS = frozenset({
    "strided_slice", "einsum", "range", "moments", "ones", "zeros", "ones_like", "zeros_like", "stack", "concat",
    "split", "add", "sub", "mul", "truediv", "floordiv", "matmul", "transpose", "while", "cond", "assert", "map",
    "norm", "batchnorm", "stateless_dropout", "stateless_random_uniform", "random_uniform", "random_normal",
    "clip_by_value", "l2_normalize", "boolean_mask", "one_hot", "reduce", "normalize", "rnn", "unstack", "conv",
    "separable_conv2d", "zero_fraction",
})  # fmt: skip
"""Scopes that TensorFlow's own functions open."""


@dataclass(frozen=True)
class Names:
    """Reads op names. `subject` is the model's name where the step is Keras's; `known` are parts of variables' paths.

    Keras enters a layer's scope a second time when it calls it, so TensorFlow adds a number to the name.

    >>> Names("transformer").layer("nebula_1/transformer_1/block0_1/attention_1/einsum/Einsum_grad/mul")
    'block0/attention'
    >>> Names("").layer("MatMul"), Names("", {"encoder"}).layer("encoder_1/MatMul")
    ('', 'encoder')
    """

    subject: str = ""
    known: Collection[str] = frozenset()

    def layer(self, name: str) -> str:
        """The path of an op's layer, at most so deep; "" for an op outside layers."""
        scope = name.rpartition("/")[0]
        found = self._told.get(scope)
        if found is None:
            found = self._told[scope] = self._path(scope)
        return found

    def maker(self, name: str) -> str:
        """The layer of an op, or the op itself where it stands in none, as a mask does that Keras makes.

        >>> Names("model").maker("model_1/embed_1/GatherV2"), Names("model").maker("model_1/NotEqual")
        ('embed', 'NotEqual')
        """
        return self.layer(name) or name.rpartition("/")[2]

    def _path(self, scope: str) -> str:
        parts = scope.split("/")
        if parts and _OURS.fullmatch(parts[0]):
            parts = parts[1:]
        found: list[str] = []
        for part in parts:
            layer = self._layer(part)
            if layer is None or len(found) > DEPTH:
                break
            found.append(layer)
        if found and found[0] == self.subject:
            found = found[1:]
        return "/".join(found[:DEPTH])

    def _layer(self, part: str) -> str | None:
        """The name of the layer whose scope this is, or None where it is a scope within a layer."""
        shorter = _AGAIN.sub("", part)
        if shorter in self._known:
            return shorter
        if part in self._known or part == LOSS:
            return part
        if part.endswith("_grad") or part[:1].isupper() or shorter in _OPS:
            return None
        if not self.subject:
            return part
        return shorter if shorter != part else None

    @cached_property
    def _told(self) -> dict[str, str]:
        """Scopes that were asked for before: a layer's ops share one."""
        return {}

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.known)
