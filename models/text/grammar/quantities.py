"""Sentences with numbers: prices, dates, times of day, counts, in words and in digits."""

from __future__ import annotations

from datetime import date

from . import english, spanish
from .phrases import COUNTED, MANY, ONE, THIS, phrase, sentence
from .pick import Both, Pick
from .words import ALL, COLORS, GOODS, MEN, MONTHS, PLACES, QUALITIES, WEEKDAYS, WOMEN, Noun, both

_MONEY = (
    (Noun("euro", False, "euro", "euros"), Noun("céntimo", False, "cent", "cents")),
    (Noun("libra", True, "pound", "pounds"), Noun("penique", False, "penny", "pence")),
    (Noun("corona", True, "crown", "crowns"), Noun("centavo", False, "centavo", "centavos")),
)


def costs(pick: Pick) -> Both:
    """Tres sillas rojas cuestan diez euros con dos céntimos. / Three red chairs cost ten euros and two cents."""
    thing = phrase(pick(GOODS), pick(COUNTED), [pick(COLORS)])
    money, small = pick(_MONEY)
    whole, rest = pick(range(2, 900)), pick(range(2, 100))
    es = f"{spanish.number(whole, money.gender)} {spanish.plural(money.es)} con {spanish.number(rest, 'm')}"
    return sentence(
        f"{thing.es} cuestan {es} {spanish.plural(small.es)}",
        f"{thing.en} cost {english.number(whole)} {money.en_many} and {english.number(rest)} {small.en_many}",
    )


def prices(pick: Pick) -> Both:
    """El precio de este reloj es 25,50 euros. / The price of this clock is 25.50 euros."""
    thing = phrase(pick(GOODS), pick(THIS), [pick(QUALITIES)])
    money, _ = pick(_MONEY)
    whole, rest = pick(range(2, 1000)), pick(range(100))
    return sentence(
        f"el precio {spanish.after('de', thing.es)} es {whole},{rest:02} {spanish.plural(money.es)}",
        f"the price of {thing.en} is {whole}.{rest:02} {money.en_many}",
    )


_EVENTS = (
    (Both("llegó", "arrived"), Both("llegaron", "arrived")),
    (Both("salió", "left"), Both("salieron", "left")),
    (Both("volvió", "came back"), Both("volvieron", "came back")),
    (Both("murió", "died"), Both("murieron", "died")),
    (Both("nació", "was born"), Both("nacieron", "were born")),
)
_WHO = (
    *((Both(name, name), False) for name in (*MEN, *WOMEN)),
    *((Both(f"{a} y {b}", f"{a} and {b}"), True) for a in MEN for b in WOMEN),
)


def dates(pick: Pick) -> Both:
    """Ana llegó el lunes tres de mayo de dos mil. / Ana arrived on Monday the third of May two thousand."""
    (who, many), (one, several) = pick(_WHO), pick(_EVENTS)
    verb = several if many else one
    day = date.fromordinal(pick(range(date(1900, 1, 1).toordinal(), date(2100, 1, 1).toordinal())))
    month, weekday = MONTHS[day.month - 1], WEEKDAYS[day.weekday()]
    return sentence(
        f"{who.es} {verb.es} el {weekday.es} {spanish.number(day.day)} de {month.es} de {spanish.number(day.year)}",
        f"{who.en} {verb.en} on {weekday.en} the {english.ordinal(day.day)} of {month.en} {english.year(day.year)}",
    )


_TIMED = (
    *((what, does)
      for what in both("el tren=the train, el autobús=the bus, el avión=the plane, el barco=the boat")
      for does in both("llega=arrives, sale=leaves, para=stops, vuelve=returns")),
    *((what, does)
      for what in both("la clase=the class, la película=the film, el concierto=the concert, la reunión=the meeting")
      for does in both("empieza=starts, termina=ends, sigue=continues, acaba=finishes")),
)  # fmt: skip
_PARTS = both("de la mañana=in the morning, de la tarde=in the afternoon, de la noche=at night")


def times(pick: Pick) -> Both:
    """Los lunes el tren sale a las tres y media de la tarde. / On Mondays the train leaves at half past three ..."""
    (what, does), part, day = pick(_TIMED), pick(_PARTS), pick(WEEKDAYS)
    hour, minutes = pick(range(1, 13)), pick(range(0, 60, 5))
    days = day.es if day.es.endswith("s") else spanish.plural(day.es)
    clock = _clock(hour, minutes)
    return sentence(
        f"los {days} {what.es} {does.es} {clock.es} {part.es}",
        f"on {english.plural(day.en)} {what.en} {does.en} {clock.en} {part.en}",
    )


_MINUTES = {15: Both("cuarto", "a quarter"), 30: Both("media", "half")}


def _clock(hour: int, minutes: int) -> Both:
    before = minutes > 30
    near = hour % 12 + 1 if before else hour
    count = 60 - minutes if before else minutes
    at = f"a la{'' if near == 1 else 's'} {spanish.number(near, 'f')}"
    if not count:
        return Both(at, f"at {english.number(near)} o'clock")
    es, en = _MINUTES.get(count) or Both(spanish.number(count), english.number(count))
    less, past = ("menos", "to") if before else ("y", "past")
    return Both(f"{at} {less} {es}", f"at {en} {past} {english.number(near)}")


def numbers(pick: Pick) -> Both:
    """El número 1234 se escribe mil doscientos treinta y cuatro. / The number 1234 is written one thousand ..."""
    value = pick(range(100_000))
    kind = pick(both("el número=the number, la respuesta=the answer, el código=the code"))
    es, en = spanish.number(value), english.number(value)
    return sentence(f"{kind.es} {value} se escribe {es}", f"{kind.en} {value} is written {en}")


_NUMBERED = both(
    "la habitación=room, la página=page, el autobús=bus, la puerta=door, el asiento=seat, la lección=lesson"
)
_NEAR = both("antes=before, después=after, cerca=near")


def rooms(pick: Pick) -> Both:
    """La página doscientos tres está cerca de la página dos. / Page two hundred and three is near page two."""
    what, value, after = pick(_NUMBERED), pick(range(1, 1000)), pick(range(1, 1000))
    near, of = pick(_NEAR), spanish.after("de", what.es)
    return sentence(
        f"{what.es} {spanish.number(value)} está {near.es} {of} {spanish.number(after)}",
        f"{what.en} {english.number(value)} is {near.en} {what.en} {english.number(after)}",
    )


def how_many(pick: Pick) -> Both:
    """¿Cuántas manzanas verdes hay en la cocina? / How many green apples are there in the kitchen?"""
    noun, color, quality, place = pick(ALL), pick(COLORS), pick(QUALITIES), pick(PLACES)
    es, en = noun.number(True)
    words = " ".join(spanish.inflect(each.es, noun.feminine, True) for each in (color, quality))
    many = "cuántas" if noun.feminine else "cuántos"
    return sentence(
        f"¿{many} {es} {words} hay {place.es}?", f"how many {quality.en} {color.en} {en} are there {place.en}?"
    )


def how_much(pick: Pick) -> Both:
    """¿Cuánto cuestan esas botellas azules pequeñas? / How much are those small blue bottles?"""
    thing = phrase(pick(GOODS), pick(ONE + MANY), [pick(COLORS), pick(QUALITIES)])
    verb = thing.does(Both("cuesta", "is"), Both("cuestan", "are"))
    return sentence(f"¿cuánto {verb.es} {thing.es}?", f"how much {verb.en} {thing.en}?")
