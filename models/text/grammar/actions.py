"""Sentences about actions of persons: present, past, future and wishes, with negation."""

from __future__ import annotations

from typing import NamedTuple

from . import english, spanish
from .phrases import COUNTED, FUTURE, PAST, PRESENT, SOME, THIS, Subject, phrase, pick_subject, sentence
from .pick import Both, Pick
from .words import ALL, COLORS, GOODS, ORIGINS, PLACES, QUALITIES, VERBS, Verb

_HE = 2


class Modal(NamedTuple):
    """A verb that takes an infinitive: the Spanish forms, and the English ones: I, he, I not, he not."""

    es: tuple[str, ...]
    en: tuple[str, str, str, str]


def _modal(es: str, en: str) -> Modal:
    return Modal(tuple(es.split()), (en, english.third_person(en), f"do not {en}", f"does not {en}"))


_MODALS = (
    _modal("quiero quieres quiere queremos quieren", "want to"),
    _modal("necesito necesitas necesita necesitamos necesitan", "need to"),
    _modal("prefiero prefieres prefiere preferimos prefieren", "prefer to"),
    _modal("espero esperas espera esperamos esperan", "hope to"),
    Modal(("puedo", "puedes", "puede", "podemos", "pueden"), ("can", "can", "cannot", "cannot")),
    Modal(("debo", "debes", "debe", "debemos", "deben"), ("must", "must", "must not", "must not")),
)


def did(pick: Pick) -> Both:
    """Ayer Pedro compró dos camisas rojas. / Pedro bought two red shirts yesterday."""
    who, verb = pick_subject(pick), pick(VERBS)
    thing = phrase(pick(GOODS), pick((*THIS, *SOME * 4, *COUNTED)), [pick(COLORS)])
    tense, when = pick(_WHEN)
    es = spanish.conjugate(verb.es, tense, who.person)
    return sentence(
        f"{when.es} {who.es} {es} {thing.es}", f"{who.en} {_conjugate(verb, tense, who)} {thing.en} {when.en}"
    )


_WHEN = tuple(
    (tense, when)
    for tense, times, share in (("past", PAST, 1), ("future", FUTURE, 1), ("present", PRESENT, 4))
    for when in times * share
)


def _conjugate(verb: Verb, tense: str, who: Subject) -> str:
    if tense == "past":
        return verb.en_past
    if tense == "future":
        return f"will {verb.en}"
    return english.third_person(verb.en) if who.person == _HE else verb.en


def wanted(pick: Pick) -> Both:
    """No queremos vender nuestra casa blanca. / We do not want to sell our white house."""
    who, modal, negated, verb = pick_subject(pick), pick(_MODALS), pick((False, True)), pick(VERBS)
    thing = phrase(pick(ALL), pick((*THIS, *SOME * 4, *COUNTED)), [pick(COLORS)])
    en = modal.en[2 * negated + (who.person == _HE)]
    return sentence(
        f"{who.es} {'no' if negated else ''} {modal.es[who.person]} {verb.es} {thing.es}",
        f"{who.en} {en} {verb.en} {thing.en}",
    )


def bought(pick: Pick) -> Both:
    """Ayer vendimos un reloj sueco caro en la calle. / Yesterday we sold an expensive Swedish clock in the street."""
    who, verb, place, when = pick_subject(pick), pick(VERBS), pick(PLACES), pick(PAST[:5])
    thing = phrase(pick(GOODS), pick(SOME), [pick(ORIGINS), pick(QUALITIES)])
    es = spanish.conjugate(verb.es, "past", who.person)
    return sentence(
        f"{when.es} {who.es} {es} {thing.es} {place.es}", f"{when.en} {who.en} {verb.en_past} {thing.en} {place.en}"
    )
