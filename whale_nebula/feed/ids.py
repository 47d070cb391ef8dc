"""`nb.init(ids=...)`: check that the named input, by which clusters compare their rows, exists in the step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from whale_nebula.errors import OptionError
from whale_nebula.errors.suggestions import did_you_mean, list_names


def compared_by(ids: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names that `ids` lists.

    >>> compared_by("x/id"), compared_by(["x/id", "y"]), compared_by(None)
    (('x/id',), ('x/id', 'y'), ())
    """
    return (ids,) if isinstance(ids, str) else tuple(ids or ())


def names_any(ids: Sequence[str], inputs: Sequence[str], where: str) -> bool:
    """Whether a step has an input that `ids` names. Refused where it has others only: by a name that means nothing no
    row would be compared.

    >>> names_any(["x/id"], ["x/id", "y"], "train.py:3"), names_any(["x/id"], [], "train.py:3")
    (True, False)
    """
    if not ids or set(ids) & set(inputs):
        return True
    if not inputs:
        return False
    given = repr(ids[0]) if len(ids) == 1 else repr(list(ids))
    raise OptionError(
        f"nb.init(ids={given}) names no input of this step",
        where=where,
        why=f"its inputs are {list_names(inputs)}; by ids that are none of them no row would be compared",
        mend=_mend(ids[0], inputs),
    )


def refuse_unshared(ids: Collection[str], readers: Mapping[str, Collection[str]], clusters: Mapping[str, str]) -> None:
    """Refuse ids that no two clusters would compare: of an input that has `readers`, only these learn a checksum.

    >>> refuse_unshared(["id"], {"id": ["gpu/0", "npu/0"], "x": ["gpu/0"]}, {"gpu/0": "gpu", "npu/0": "npu"})
    """
    for name in sorted(readers.keys() & set(ids)):
        if len({clusters[worker] for worker in readers[name]}) < 2 <= len(set(clusters.values())):
            raise OptionError(
                f"nb.init(ids={name!r}) names an input that 'inputs' of the config keeps to the workers that read it",
                where=f"inputs.{name}",
                why="no two clusters read it here, so none would learn a checksum of it, and no row would be compared",
                mend=f"leave {name!r} out of 'inputs' in every config, and give it in every cluster\n"
                "or compare by another input, which all clusters have",
            )


def _mend(name: str, inputs: Sequence[str]) -> str:
    inner = [each for each in inputs if each.endswith(f"/{name}")]
    return f'nb.init(ids="{inner[0]}")' if inner else did_you_mean(name, inputs)
