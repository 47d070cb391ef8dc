"""Enforce a config's rules on inputs: which of them may not reach a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from whale_nebula.config.schema import DEPENDS, ITSELF, Forbid
from whale_nebula.errors import ForbiddenCrossingError
from whale_nebula.ir.cut import ALL_CLUSTERS, InputCrossing
from whale_nebula.site import script_site, warn_at

_LISTED = 4
_ALL = "*"


class Breach(NamedTuple):
    """A crossing that breaks a rule, with the input that it depends on, and how (a key of `_WORDS`)."""

    rule: Forbid
    crossing: InputCrossing
    input: str
    how: str

    def __str__(self) -> str:
        return f"{describe_crossing(self.crossing)}: {_WORDS[self.how].format(self.input)}"


def describe_crossing(crossing: InputCrossing) -> str:
    """A crossing in words: its name and the clusters at its ends.

    >>> describe_crossing(InputCrossing("b0", "gpu", "npu", {}))
    'b0, gpu -> npu'
    """
    if not crossing.source:
        who = "every other cluster" if crossing.destination == ALL_CLUSTERS else crossing.destination
        return f"{crossing.name}, in {who}"
    return f"{crossing.name}, {crossing.source} -> {crossing.destination}"


_WORDS: Mapping[str, str] = {
    ITSELF: "{} itself, or computed from inputs alone",
    "derived": "computed from {} and weights",
    "gradient": "a gradient that depends on {}",
    "number": "single numbers that depend on {}",
}


def find_breaches(crossings: Collection[InputCrossing], rules: Sequence[Forbid]) -> Iterator[Breach]:
    """All crossings that a rule forbids."""
    for rule in rules:
        for each in crossings:
            if each.destination in (rule.cluster, ALL_CLUSTERS):
                for name, how in each.depends.items():
                    if _rule_concerns(rule, name) and how not in rule.allow:
                        yield Breach(rule, each, name, how)


def check_forbidden(
    name: str, crossings: Collection[InputCrossing], rules: Sequence[Forbid], inputs: Sequence[str], *, trains: bool
) -> None:
    """Refuse a step in which a crossing breaks a rule; warn of a training step without any input that a rule names."""
    unmet = [rule for rule in rules if not forbidden_inputs([rule], inputs)]
    if trains and unmet:
        what = f"no input of {name} is named in the config's 'forbid'"
        rules_text = ", ".join(map(str, unmet))
        why = f"the inputs are {', '.join(inputs)}; these rules match none of them: {rules_text}"
        if not inputs:
            why = f"the step has no inputs; these rules match nothing: {rules_text}"
        mend = f"forbid: [{inputs[-1]} -> ...]" if inputs else "pass the data that the rules name as arguments"
        warn_at(script_site(), what, why=why, mend=mend)
    breaches = list(find_breaches(crossings, rules))
    if not breaches:
        return
    rule = breaches[0].rule
    ways = [how for how in DEPENDS if how in {*rule.allow, *(each.how for each in breaches if each.rule == rule)}]
    found = list(dict.fromkeys(map(str, breaches)))
    rest = [f"and {len(found) - _LISTED} more"] * (len(found) > _LISTED)
    raise ForbiddenCrossingError(
        f"{name} sends data to {rule.cluster!r} that the config forbids: {rule}",
        where="forbid",
        why="\n".join([*found[:_LISTED], *rest]),
        mend="run the stages that need it in another cluster; or, if this data may be sent, "
        f"forbid: [{{input: {rule.input}, cluster: {rule.cluster}, allow: [{', '.join(ways)}]}}]",
    )


def forbidden_inputs(rules: Sequence[Forbid], inputs: Sequence[str]) -> frozenset[str]:
    """The inputs that rules protect.

    >>> sorted(forbidden_inputs([Forbid("y", "npu")], ["x/a", "x/b", "y"]))
    ['y']
    """
    return frozenset(each for each in inputs if any(_rule_concerns(rule, each) for rule in rules))


def _rule_concerns(rule: Forbid, name: str) -> bool:
    return rule.input in (name, name.partition("/")[0], _ALL)
