"""The words: each Spanish one has exactly one English one, and vice versa, so that a translation is right or wrong."""

from __future__ import annotations

from typing import NamedTuple

from . import english, spanish
from .pick import Both


class Noun(NamedTuple):
    """A countable noun."""

    es: str
    feminine: bool
    en: str
    en_many: str

    @property
    def gender(self) -> str:
        """The gender as an argument of numbers."""
        return "f" if self.feminine else "m"

    def number(self, many: bool) -> Both:
        """The noun alone, singular or plural."""
        return Both(spanish.plural(self.es), self.en_many) if many else Both(self.es, self.en)


class Verb(NamedTuple):
    """A verb with an object, regular in Spanish."""

    es: str
    en: str
    en_past: str


def _nouns(text: str) -> tuple[Noun, ...]:
    """Parse lines of `es gender en`, with an irregular English plural after a slash."""
    found = []
    for entry in text.split(","):
        es, gender, en = entry.strip().split(" ", 2)
        one, _, many = en.partition("/")
        found.append(Noun(es, gender == "f", one, many or english.plural(one)))
    return tuple(found)


def _verbs(text: str) -> tuple[Verb, ...]:
    return tuple(Verb(*entry.strip().split("=")) for entry in text.split(","))


def both(text: str) -> tuple[Both, ...]:
    """Parse lists of `es=en`."""
    return tuple(Both(*entry.strip().split("=")) for entry in text.split(","))


THINGS = _nouns(
    "libro m book, casa f house, coche m car, silla f chair, camisa f shirt, zapato m shoe, bicicleta f bicycle, vaso "
    "m glass, plato m plate, cuchara f spoon, cuchillo m knife/knives, llave f key, reloj m clock, carta f letter, "
    "flor f flower, lámpara f lamp, mesa f table, puerta f door, ventana f window, caja f box, bolsa f bag, botella f "
    "bottle, sombrero m hat, falda f skirt, chaqueta f jacket, vestido m dress, abrigo m coat, guante m glove, maleta "
    "f suitcase, lápiz m pencil, cuaderno m notebook, periódico m newspaper, revista f magazine, foto f photo, espejo "
    "m mirror, manta f blanket, cama f bed, guitarra f guitar, pelota f ball, muñeca f doll, martillo m hammer, cesta "
    "f basket, taza f cup, jarra f jug, barco m boat, camión m lorry, avión m plane, piedra f stone, anillo m ring, "
    "bandera f flag, moneda f coin, teléfono m telephone, sofá m sofa/sofas, cuerda f rope, escalera f ladder, tambor "
    "m drum, botón m button, cinturón m belt, pantalla f screen, rueda f wheel"
)
FOODS = _nouns(
    "manzana f apple, naranja f orange, limón m lemon, pera f pear, huevo m egg, pan m loaf/loaves, queso m cheese, "
    "tomate m tomato, cebolla f onion, zanahoria f carrot, galleta f biscuit, pastel m cake, fresa f strawberry, uva "
    "f grape, plátano m banana, patata f potato, pimiento m pepper, melón m melon, sandía f watermelon, nuez f nut"
)
ANIMALS = _nouns(
    "gato m cat, perro m dog, caballo m horse, vaca f cow, cordero m lamb, gallina f hen, pato m duck, ratón m "
    "mouse/mice, pájaro m bird, conejo m rabbit, tortuga f turtle, rana f frog, abeja f bee, mariposa f butterfly, "
    "león m lion, tigre m tiger, oso m bear, mono m monkey, cabra f goat, burro m donkey, ballena f whale, lobo m "
    "wolf/wolves"
)
PEOPLE = _nouns(
    "padre m father, madre f mother, hermano m brother, hermana f sister, abuelo m grandfather, abuela f grandmother, "
    "tío m uncle, tía f aunt, hijo m son, hija f daughter, rey m king, reina f queen, niño m boy, niña f girl, hombre "
    "m man/men, mujer f woman/women, actriz f actress, camarera f waitress, sobrino m nephew, sobrina f niece"
)
GOODS = THINGS + FOODS
ALL = GOODS + ANIMALS
FURNITURE = _nouns(
    "mesa f table, silla f chair, cama f bed, caja f box, sofá m sofa/sofas, alfombra f carpet, estante m "
    "shelf/shelves, escritorio m desk, banco m bench, manta f blanket"
)
COLORS = both(
    "rojo=red, azul=blue, verde=green, blanco=white, negro=black, amarillo=yellow, gris=grey, marrón=brown, "
    "rosado=pink, morado=purple"
)
QUALITIES = both(
    "grande=big, pequeño=small, nuevo=new, viejo=old, bonito=pretty, feo=ugly, barato=cheap, caro=expensive, "
    "limpio=clean, sucio=dirty, pesado=heavy, ligero=light, fuerte=strong, raro=strange, famoso=famous, útil=handy, "
    "perfecto=perfect, elegante=elegant, especial=special, horrible=horrible, moderno=modern, antiguo=ancient, "
    "suave=soft, duro=hard"
)
ORIGINS = both(
    "español+=Spanish, inglés+=English, francés+=French, alemán+=German, italiano=Italian, japonés+=Japanese, "
    "mexicano=Mexican, chino=Chinese, irlandés+=Irish, sueco=Swedish"
)
COMPARED = both(
    "grande=bigger, pequeño=smaller, viejo=older, bonito=prettier, feo=uglier, barato=cheaper, caro=more expensive, "
    "limpio=cleaner, sucio=dirtier, pesado=heavier, fuerte=stronger, raro=stranger, famoso=more famous, elegante=more "
    "elegant, moderno=more modern, suave=softer, duro=harder"
)
STATES = both(
    "cansado=tired, enfermo=ill, contento=happy, triste=sad, enfadado=angry, ocupado=busy, solo=alone, "
    "dormido=asleep, preocupado=worried, sentado=sitting, perdido=lost, preparado=ready, sorprendido=surprised, "
    "nervioso=nervous"
)
JOBS = both(
    "abogado=lawyer, médico=doctor, maestro=teacher, ingeniero=engineer, enfermero=nurse, cocinero=cook, "
    "secretario=secretary, panadero=baker, carpintero=carpenter, arquitecto=architect, pintor+=painter, "
    "escritor+=writer, profesor+=professor, jardinero=gardener, granjero=farmer, peluquero=hairdresser"
)
PLACES = both(
    "en la cocina=in the kitchen, en el jardín=in the garden, en la escuela=at the school, en el mercado=at the "
    "market, en la estación=at the station, en la oficina=in the office, en la calle=in the street, en el parque=in "
    "the park, en el hospital=in the hospital, en la biblioteca=in the library, en la playa=on the beach, en el "
    "museo=in the museum, en la iglesia=in the church, en el pueblo=in the village, en el teatro=at the theatre, en "
    "la tienda=in the shop, en el aeropuerto=at the airport, en la granja=on the farm, en el bosque=in the forest, en "
    "el puerto=in the harbour"
)
CITIES = both(
    "Madrid=Madrid, Sevilla=Seville, Londres=London, París=Paris, Roma=Rome, Lisboa=Lisbon, Viena=Vienna, "
    "Atenas=Athens, Moscú=Moscow, Nueva York=New York, Ginebra=Geneva, Bruselas=Brussels, Praga=Prague, "
    "Berlín=Berlin, Pekín=Beijing, Tokio=Tokyo"
)
PREPOSITIONS = both(
    "sobre=on, debajo de=under, detrás de=behind, delante de=in front of, al lado de=next to, cerca de=near, lejos "
    "de=far from"
)
MEN = ("Pedro", "Luis", "Carlos", "Miguel", "Pablo", "Antonio", "Diego", "Jorge")
WOMEN = ("Ana", "María", "Carmen", "Elena", "Lucía", "Isabel", "Rosa", "Marta")
MONTHS = both(
    "enero=January, febrero=February, marzo=March, abril=April, mayo=May, junio=June, julio=July, agosto=August, "
    "septiembre=September, octubre=October, noviembre=November, diciembre=December"
)
WEEKDAYS = both(
    "lunes=Monday, martes=Tuesday, miércoles=Wednesday, jueves=Thursday, viernes=Friday, sábado=Saturday, "
    "domingo=Sunday"
)
VERBS = _verbs(
    "comprar=buy=bought, vender=sell=sold, limpiar=clean=cleaned, pintar=paint=painted, mirar=look at=looked at, "
    "llevar=carry=carried, lavar=wash=washed, usar=use=used, olvidar=forget=forgot, romper=break=broke, "
    "recibir=receive=received, preparar=prepare=prepared, reparar=repair=repaired, alquilar=rent=rented, "
    "cambiar=change=changed, esconder=hide=hid, necesitar=need=needed, guardar=keep=kept, prestar=lend=lent, "
    "dibujar=draw=drew, tirar=throw=threw, describir=describe=described, compartir=share=shared, "
    "levantar=lift=lifted, empujar=push=pushed, robar=steal=stole, cortar=cut=cut, dejar=leave=left"
)
