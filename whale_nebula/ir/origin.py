"""Where an op comes from, as far as its user can know it: a line of the script, and the Keras layer around the op."""

from __future__ import annotations


class Origin(str):
    """The user's line, and the layer that made the op there: its path in the model and its class.

    >>> origin = Origin("train.py:12", layer="encoder/norm", kind="BatchNormalization")
    >>> print(origin, "|", origin.said)
    train.py:12 | BatchNormalization 'encoder/norm'
    """

    __slots__ = ("kind", "layer")

    layer: str
    kind: str

    def __new__(cls, line: str, layer: str = "", kind: str = "") -> Origin:
        """The line, and what is known besides."""
        made = super().__new__(cls, line)
        made.layer, made.kind = layer, kind
        return made

    @property
    def said(self) -> str:
        """The layer in words; nothing where there is none."""
        return f"{self.kind or 'layer'} {self.layer!r}" if self.layer else ""
