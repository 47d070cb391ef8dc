"""Four bits a number and fewer, block by block: what the parts are, and how long blocks are.

A tensor [..., n] is a matrix of m rows and n columns. Each row is cut into blocks of b neighbours, and filled up with
zeros. A block x crosses as a scale s and as odd integers q (1, 3, 5 and 7 and their opposites with three bits) for
which s * q is near turn(x). To turn is to multiply by a matrix H of ones and minus ones whose rows stand at right
angles (Hadamard's, its columns with fixed signs): every number of the block goes into each of the b that cross, so
these are nearly normal whatever the block holds (outliers, zeros, numbers of one sign), and few levels at even
distances are nearly the best for that. Of a gradient each number changes its sign by chance before that, and not by a
fixed rule: what is lost then is another thing in every row and step, and little of it in the sum. What the signs are
drawn by crosses with it; it is zero where they are fixed.

What comes back is an integer, H^T q, times a scale of few digits: the same bits on every machine.
"""

from __future__ import annotations

from whale_nebula.codec.blocks import SCALE, rows_and_columns
from whale_nebula.codec.parts import Part
from whale_nebula.errors import OptionError

LEAST, MOST = 8, 256
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}
"""How many bits of each number lie together, from the lowest on: so many as go into a byte without a rest."""


def check_block(codec: str, block: object) -> None:
    """Refuse what no block can be."""
    whole = isinstance(block, int) and not isinstance(block, bool)
    if not whole or not LEAST <= block <= MOST or block & (block - 1):  # type: ignore[operator]
        raise OptionError(
            f"{codec}({block!r}) cannot be",
            why=f"a block is turned by halves: it is a power of two from {LEAST} to {MOST}",
            mend=f"nb.codec.{codec}(128)",
        )


def block_of(columns: int, bits: int, most: int) -> int:
    """The block, `most` or less, with which rows of so many columns take the fewest bytes; the longest of these.

    >>> [block_of(columns, 2, 128) for columns in (768, 100, 48, 20, 1)]
    [128, 128, 64, 32, 8]
    """
    sizes = [most >> halved for halved in range(most.bit_length()) if most >> halved >= LEAST]
    return min(sizes, key=lambda size: -(-columns // size) * (size * bits // 8 + 2))


def parts(dims: tuple[int, ...], bits: int, most: int) -> tuple[Part, ...]:
    """The scales, then the integers, in as many bits as they have, then what signs were drawn by.

    >>> parts((64, 768), 2, 128)[:2]
    (Part(dtype='bfloat16', dims=(64, 6)), Part(dtype='uint8', dims=(64, 192)))
    >>> parts((3, 20), 3, 128)[1:]
    (Part(dtype='uint8', dims=(3, 12)), Part(dtype='uint32', dims=(2,)))
    """
    rows, columns = rows_and_columns(dims)
    block = block_of(columns, bits, most)
    count = -(-columns // block)
    return Part(SCALE, (rows, count)), Part("uint8", (rows, count * block * bits // 8)), Part("uint32", (2,))
