"""Codecs as data: combination, text form, and user-defined ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whale_nebula as nb
from whale_nebula.codec import (
    BF16,
    CODECS,
    FP16,
    INT4,
    INT8,
    SVD,
    Codec,
    Part,
    Rank,
    TopK,
    parse,
    register,
)
from whale_nebula.codec.precisions import Integers
from whale_nebula.errors import OptionError

SHARES = st.floats(0, 1, exclude_min=True, allow_subnormal=False)
PRECISIONS = st.sampled_from([FP16(), BF16(), INT8(), INT4()])
STRUCTURES = st.one_of(
    st.builds(SVD, SHARES),
    st.builds(TopK, SHARES),
    st.builds(Rank, st.integers(1, 10_000), st.sampled_from(["shared", "learned"])),
)
CHAINS = st.builds(lambda structure, precision: structure >> precision, STRUCTURES, PRECISIONS)
ANY = st.one_of(PRECISIONS, STRUCTURES, CHAINS)


@given(ANY)
def test_codec_text_round_trip(codec: Codec) -> None:
    assert parse(str(codec)) == codec


@given(ANY)
def test_codec_is_hashable_and_has_an_evaluable_repr(codec: Codec) -> None:
    assert hash(parse(str(codec))) == hash(codec)
    assert eval(repr(codec), {**vars(nb.codec)}) == codec


@given(PRECISIONS, ANY)
def test_chain_after_a_precision_is_refused(precision: Codec, other: Codec) -> None:
    with pytest.raises(OptionError):
        precision >> other


@given(STRUCTURES, st.one_of(STRUCTURES, CHAINS))
def test_two_structures_are_refused(first: Codec, second: Codec) -> None:
    with pytest.raises(OptionError, match="at most one structure"):
        first >> second


def test_wrong_order_error_gives_the_right_order() -> None:
    with pytest.raises(OptionError) as caught:
        FP16() >> SVD(0.6)
    assert caught.value.mend == "SVD(ratio=0.6) >> FP16()"
    with pytest.raises(OptionError, match="keep one of FP16"):
        FP16() >> INT8()


REFUSED: dict[str, tuple[Callable[[Any], object], list[Any], str]] = {
    "a share": (SVD, [0, -0.1, 1.1, "0.6", None, True, float("nan")], "fraction"),
    "a share of the largest": (TopK, [0, -0.1, 1.1, "0.6", None, True, float("nan")], "fraction"),
    "a rank": (Rank, [0, -1, 1.5, "96", True], "rank"),
    "what follows a structure": (lambda other: SVD(0.6) >> other, ["fp16"], "'fp16' is not a codec"),
    "whole numbers in bits behind a structure": (parse, ["rank(8) >> bits"], "is not a codec"),
    "neither precision nor structure": (register, [object, 3, nb.codec.Codec], "is not a codec"),
    "integers that are not packed": (
        lambda bits: type("Six", (Integers,), {"name": "six", "bits": bits, "block": 32}), [6], r"Six\.bits is 6"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "values", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_codec_is_refused(make: Callable[[Any], object], values: list[Any], message: str) -> None:
    for value in values:
        with pytest.raises(OptionError, match=message):
            make(value)


def test_codec_text_formats_numpy_numbers() -> None:
    import numpy as np

    assert str(SVD(np.float64(0.5))) == "svd(0.5)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp61", "did you mean 'fp16'"),
        ("svd(0.6) >> zip", "choose one of"),
        ("svd(0.6", "write it like"),
        ("", "write it like"),
        ("svd", r"missing a required argument: 'ratio'\n.*svd\(0.6\)"),
        ("topk(2)", r"topk\(2\) is out of range[^~]*mend: topk\(0.1\)"),
        ("fp16(1)", r"too many positional arguments\n.*mend: fp16$"),
        ("svd(0.6) >> fp16 >> int8", "keep one of"),
        ("svd(word)", "fraction"),
    ],
)
def test_parse_refuses_invalid_text(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(text)


def test_reduce_back_is_refused_for_a_structure_without_returns() -> None:
    with pytest.raises(OptionError, match="a gradient cannot be sent as svd") as caught:
        SVD(0.5).reduce_back(None, None)
    assert "returns = False" in caught.value.mend


def test_parse_error_lists_selectable_codecs() -> None:
    with pytest.raises(OptionError) as caught:
        parse("fp8", ("auto",))
    assert "'int4', 'coded', 'auto'" in caught.value.mend
    assert "bits" not in caught.value.mend
    with pytest.raises(OptionError) as caught:
        parse("svd(0.6) >> fp8", ("auto",))
    assert "auto" not in caught.value.mend


@pytest.fixture(autouse=True)
def restored_codecs() -> Iterator[None]:
    before = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(before)


def make_halved_class(name: str = "halved") -> type[Any]:
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


def test_registered_codec_parses_and_chains() -> None:
    kind = register(make_halved_class())
    assert parse("halved(0.25)") == kind(0.25)
    assert parse("svd(0.6) >> halved") == nb.codec.SVD(0.6) >> kind()
    assert nb.codec.is_built(kind())


def test_registering_a_codec_twice_replaces_it() -> None:
    """As a notebook does whose cell is run again."""
    register(make_halved_class())
    again = register(make_halved_class())
    assert type(parse("halved")) is again


def test_register_refuses_a_name_in_use() -> None:
    with pytest.raises(OptionError, match="with the name 'int8' is already registered") as caught:
        register(make_halved_class("int8"))
    assert caught.value.mend == "name = 'int82'"


@pytest.mark.parametrize("name", ["", "two words", "Halved", "a-b", "3d", "none", "auto"])
def test_register_refuses_an_invalid_name(name: str) -> None:
    with pytest.raises(OptionError, match="is not a valid codec name"):
        register(make_halved_class(name))


def test_register_reports_missing_methods() -> None:
    class Half(nb.codec.Precision):
        name = "half_done"

        def parts(self, dims: tuple[int, ...], dtype: str) -> tuple[Part, ...]:
            return ()

    with pytest.raises(OptionError, match="Half lacks encode, decode") as caught:
        register(Half)
    assert caught.value.mend.startswith("def encode")


def test_returning_structure_needs_both_return_methods() -> None:
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
