"""Sealed frames: only valid ones open."""

import itertools

import numpy as np
import pytest

from whale_nebula.errors import DamagedFrameError, RemoteProtocolError
from whale_nebula.wire.frame import TAG_BYTES, Flag, Header, Kind, pack, sealed_header_bytes, unpack
from whale_nebula.wire.greeting import Exchange, Sealer
from whale_nebula.wire.tensor import dtype_code

HEADER = Header(
    Kind.SCALAR,
    flags=Flag.LAST,
    conversation=9,
    sequence=5,
    source=0,
    destination=1,
    length=4,
    whole=4,
    dtype=dtype_code("uint8"),
    dims=(4,),
)
CHUNK = np.array([1, 2, 3, 4], np.uint8)


def sealers() -> tuple[Sealer, Sealer]:
    material = bytes(range(64))
    return Sealer(material, 0, 1), Sealer(material, 1, 0)


def opened(sealer: Sealer, header: Header, sealed: np.ndarray) -> tuple[Header, list[int]]:
    place = np.zeros(sealed.size - TAG_BYTES, np.uint8)
    return sealer.open(header, sealed, place), place.tolist()


def test_what_was_sealed_opens_at_the_other_side() -> None:
    here, there = sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    assert header == HEADER._replace(flags=Flag.LAST | Flag.SEALED, length=4 + TAG_BYTES)
    assert sealed.size == header.length and CHUNK.tobytes() not in sealed.tobytes()
    assert opened(there, header, sealed) == (HEADER, [1, 2, 3, 4])


def test_an_empty_chunk_is_sealed_too() -> None:
    here, there = sealers()
    empty = HEADER._replace(length=0, whole=0, dims=(0,))
    assert opened(there, *here.seal(empty, CHUNK[:0])) == (empty, [])


CHANGES = [
    {"kind": Kind.RESULT},
    {"conversation": 8},
    {"sequence": 6},
    {"program": 1},
    {"step": 1},
    {"source": 1},
    {"destination": 0},
    {"phase": 1},
    {"shard": 1},
    {"slot": 1},
    {"micro_batch": 0},
    {"offset": 1},
    {"whole": 5},
    {"codec": 1},
    {"direction": 1},
    {"dtype": 2},
    {"state": 1},
    {"dims": (2, 2)},
    {"flags": int(Flag.SEALED)},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_chunk_opens_only_under_its_own_header(change: dict[str, int]) -> None:
    here, there = sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    with pytest.raises(DamagedFrameError, match="the seal of frame"):
        opened(there, header._replace(**change), sealed)


def test_every_field_but_the_acknowledgement_is_bound() -> None:
    changed = {name for change in CHANGES for name in change}
    assert changed == set(Header._fields) - {"ack", "length"}  # a wrong length is a wrong ciphertext
    here, there = sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    assert opened(there, header._replace(ack=77), sealed)[1] == [1, 2, 3, 4]
    assert sealed_header_bytes(header) == sealed_header_bytes(header._replace(ack=77))


def test_every_flipped_bit_breaks_the_seal() -> None:
    here, there = sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    for bit in range(sealed.size * 8):
        broken = sealed.copy()
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFrameError):
            opened(there, header, broken)


def test_each_direction_has_its_own_key() -> None:
    here, there = sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    with pytest.raises(DamagedFrameError):
        opened(here, header, sealed)
    assert there.seal(HEADER, CHUNK)[1].tobytes() != sealed.tobytes()


def test_a_sealed_header_is_legal_only_where_there_is_a_key() -> None:
    header, _ = sealers()[0].seal(HEADER, CHUNK)
    packed = pack(header, 0, sealed=True)
    assert unpack(packed, sealed=True) == (header, 0)
    with pytest.raises(RemoteProtocolError, match="no key"):
        unpack(packed)


def test_keys_depend_on_both_halves_and_on_the_salt() -> None:
    a, b, c = Exchange(), Exchange(), Exchange()
    made = [a.agree(b.public, b"1"), a.agree(b.public, b"2"), a.agree(c.public, b"1"), b.agree(c.public, b"1")]
    assert b.agree(a.public, b"1") == made[0]
    assert all(len(material) == 64 for material in made)
    assert all(one != other for one, other in itertools.combinations(made, 2))


@pytest.mark.parametrize("theirs", [bytes(32), b"\x01" + bytes(31), b"short", b""], ids=repr)
def test_a_half_that_is_none_is_refused(theirs: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="key exchange"):
        Exchange().agree(theirs, b"salt")
