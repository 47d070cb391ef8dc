"""A user's own codec: entered by its name, known to texts and plans, refused where something is missing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import whale_nebula as nb
from whale_nebula.codec import CODECS, Part, parse, register
from whale_nebula.errors import OptionError


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(before)


def halved(name: str = "halved") -> type[Any]:
    """A precision that is right in all but, perhaps, its name."""
    chosen = name

    @dataclass(frozen=True)
    class Halved(nb.codec.Precision):
        name = chosen
        share: float = 0.5

        def parts(self, dims: tuple[int, ...], dtype: str) -> tuple[Part, ...]:
            return (Part("float16", dims),)

        def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
            return (x,)

        def decode(self, parts: Sequence[Any], dims: tuple[int, ...], dtype: str) -> Any:
            return parts[0]

    return Halved


def test_a_registered_codec_has_a_text_and_joins_others() -> None:
    kind = register(halved())
    assert parse("halved(0.25)") == kind(0.25)
    assert parse("svd(0.6) >> halved") == nb.codec.SVD(0.6) >> kind()
    assert nb.codec.is_built(kind())


def test_registering_the_same_again_is_no_clash() -> None:
    """As a notebook does whose cell is run again."""
    register(halved())
    again = register(halved())
    assert type(parse("halved")) is again


def test_another_codec_of_the_same_name_is_refused() -> None:
    with pytest.raises(OptionError, match="is called 'int8' already") as caught:
        register(halved("int8"))
    assert caught.value.mend == "name = 'int82'"


@pytest.mark.parametrize("name", ["", "two words", "Halved", "a-b", "3d", "none", "auto"])
def test_a_name_can_be_written_in_a_text(name: str) -> None:
    with pytest.raises(OptionError, match="cannot name a codec"):
        register(halved(name))


@pytest.mark.parametrize("thing", [object, 3, nb.codec.Codec], ids=repr)
def test_what_is_neither_precision_nor_structure_is_no_codec(thing: Any) -> None:
    with pytest.raises(OptionError, match="is no codec"):
        register(thing)


def test_what_is_missing_is_named() -> None:
    class Half(nb.codec.Precision):
        name = "half_done"

        def parts(self, dims: tuple[int, ...], dtype: str) -> tuple[Part, ...]:
            return ()

    with pytest.raises(OptionError, match="Half lacks encode, decode") as caught:
        register(Half)
    assert caught.value.mend.startswith("def encode")


def test_a_structure_that_returns_needs_both_ways_back() -> None:
    class Returning(nb.codec.Structure):
        name = "returning"
        returns = True

        def numbers(self, dims: tuple[int, ...]) -> Any:
            return None

        def reduce(self, state: Any, x: Any) -> Any:
            return None

        def expand(self, state: Any, numbers: Any, extras: Any, dims: Any) -> Any:
            return None

    with pytest.raises(OptionError, match="lacks reduce_back, expand_back"):
        register(Returning)
