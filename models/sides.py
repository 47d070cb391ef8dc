"""Translators as Keras models: an encoder and a decoder in two places, with only hidden states sent between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import keras

from whale_nebula.errors import OptionError
from whale_nebula.scopes.frames import impose_frames, open_frames

from .decoder import Decoder
from .decoding import Beam, Found, beamed
from .encoder import Encoder, Source

Around = Callable[[str], AbstractContextManager[Any]]
"""Returns the scope in which a side is built: called with "source" and with "target"."""


def nowhere(part: object) -> AbstractContextManager[None]:
    """The default of `around`: no scope, for any part.

    >>> with nowhere("source") as nothing:
    ...     nothing
    """
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Sides:
    """The two sides of a translator, and the function that returns their scopes."""

    encoder: Encoder
    decoder: Decoder
    around: Around


class Translating(keras.Model):
    """Common base of translators: `{"source": ids, "target": shown ids}` in, logits over the target's vocabulary out.

    Called with a `search`, it takes only source ids and decodes: the encoder runs in the source's scope, the entire
    search in the target's, both inside the `nb.compress` in which the model was built, so that tensors are sent in the
    same encoding as in training. `decoding.translation` creates a function for it.
    """

    sides: Sides
    searched_by: ClassVar[type] = Beam

    def __init__(self, sides: Sides, config: dict[str, Any], lengths: keras.layers.Layer | None = None) -> None:
        inputs = {side: keras.Input((None,), dtype="int32", name=side) for side in ("source", "target")}
        with sides.around("source"):
            hidden = sides.encoder(inputs["source"])
        with sides.around("target"):
            outputs = sides.decoder(inputs["target"], hidden)
            if lengths is not None:
                outputs = {"words": outputs, "length": lengths(*hidden)}
        super().__init__(inputs, outputs, name=config["name"])
        self.sides, self._config = sides, MappingProxyType(config)
        self._compressed = tuple(frame for frame in open_frames() if frame.kind == "compress")
        self.input_spec = None  # a search has only a source

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, search: Any = None) -> Any:
        """Logits for a batch of pairs; or, with a `search`, its result for a batch of source ids."""
        if search is None:
            return super().call(inputs, training=training, mask=mask)
        self._check(search)
        with impose_frames((*open_frames(), *self._compressed)):
            with self.sides.around("source"):
                source = self.sides.encoder(inputs["source"] if isinstance(inputs, dict) else inputs)
            with self.sides.around("target"):
                return self.find(source, search)

    def get_config(self) -> dict[str, Any]:
        """The options to recreate the model, without scopes."""
        return dict(self._config)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create an equal model, without scopes."""
        both = {side: keras.saving.deserialize_keras_object(config[side]) for side in ("source", "target")}
        return cls(**{**config, **both})

    def find(self, source: Source, search: Any) -> Found:
        """Search for translations of an encoded source; called in the target's scope. By default a beam search with
        cached prefixes.
        """
        return beamed(self.sides.decoder, source, search)

    def _check(self, search: Any) -> None:
        if not isinstance(search, self.searched_by):
            name = self.searched_by.__name__
            raise OptionError(
                f"{self.name!r} cannot be decoded by {type(search).__name__}",
                why="causal models need a Beam, and models that predict hidden words need a MaskPredict",
                mend=f"search={name}(...), from whale_nebula.models.decoding",
            )


def check_names(source: Any, target: Any) -> None:
    """Refuse two BERTs with one name, as their layers' names would be equal."""
    if source.name == target.name:
        raise OptionError(
            f"both BERTs have the name {source.name!r}",
            why="their layers' names begin with it, and layer names must be unique in a model",
            mend='Bert(sizes, name="source") and Bert(sizes, name="target"); load_bert(folder, name="source")',
        )
