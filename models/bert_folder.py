"""A BERT from a Hugging Face folder, and into one: `config.json`, `model.safetensors`, `vocab.txt`.

Nothing in these files is code. `safetensors` reads and writes them; it comes with `pip install whale-nebula[bert]`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whale_nebula.errors import ConfigError, WeightsError

from .bert import Bert, BertSizes
from .bert_config import config_of, sizes_of
from .bert_tensors import PREFIX, Place, check_fit, head_places, places_of, plain_names
from .masked_lm import MaskedLm, masked_lm

if TYPE_CHECKING:
    from .text.vocabulary import Vocabulary

CONFIG, TENSORS, WORDS = "config.json", "model.safetensors", "vocab.txt"
log = logging.getLogger("whale_nebula.models.bert_folder")


def load_bert(folder: str | Path, *, name: str = "bert", weights: bool = True) -> Bert:
    """The BERT of a folder. Of a model for some task only the encoder is taken.

    `name` begins the names of its layers: give two BERTs of one model different ones. Without `weights` it has the
    sizes that `config.json` says, and nothing else is read: for a cluster in which it does not live.
    """
    folder = Path(folder)
    bert = Bert(_sizes(folder), name=name)
    if weights:
        _fill(folder, places_of(bert))
    return bert


def load_masked_lm(folder: str | Path, *, name: str = "bert") -> MaskedLm:
    """The BERT of a folder with its head that guesses hidden tokens, to pretrain it further."""
    folder = Path(folder)
    model = masked_lm(Bert(_sizes(folder), name=name))
    _fill(folder, places_of(model.bert) | head_places(model))
    return model


def save_bert(model: Bert | MaskedLm, folder: str | Path, vocabulary: Vocabulary) -> None:
    """Write a BERT, with its head if it is a `masked_lm`, and its vocabulary, so that Hugging Face loads them too."""
    from .text.vocabulary import write_vocabulary  # reading a folder needs nothing of text

    bert = model.bert if isinstance(model, MaskedLm) else model
    vocabulary.check_fits(bert.sizes.vocabulary, padded=True)
    places, architecture = places_of(bert), "BertModel"
    if isinstance(model, MaskedLm):
        places = {f"{PREFIX}{name}": place for name, place in places.items()} | head_places(model)
        architecture = "BertForMaskedLM"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: place.take() for name, place in places.items()}
    _safetensors().numpy.save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config_of(bert.sizes, architecture), indent=2) + "\n", "utf-8")
    write_vocabulary(vocabulary, folder / WORDS)


def _sizes(folder: Path) -> BertSizes:
    path = folder / CONFIG
    _check_there(folder, CONFIG)
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise WeightsError(f"config.json cannot be read: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise WeightsError("config.json holds no names and values", where=str(path))
    sizes = sizes_of(config, str(path))
    _check_words(folder / WORDS, sizes.vocabulary)
    return sizes


def _fill(folder: Path, places: dict[str, Place]) -> None:
    """Give every place its tensor, after all of them are seen to fit."""
    path = folder / TENSORS
    _check_there(folder, TENSORS)
    with _opened(path) as file:
        names = plain_names(file.keys())
        check_fit(places, {name: tuple(file.get_slice(names[name]).get_shape()) for name in names}, str(path))
        if left_out := sorted(set(names) - set(places)):
            log.info("%s: not loaded, as they are no part of the model: %s", path, ", ".join(left_out))
        for name, place in places.items():
            place.fill(np.asarray(file.get_tensor(names[name]), "float32"))


def _opened(path: Path) -> Any:
    safetensors = _safetensors()
    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise WeightsError(
            f"model.safetensors cannot be read: {error}",
            where=str(path),
            mend="download it again; git keeps only a line of text in its place where git-lfs is not installed",
        ) from None


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise ConfigError(
            "a BERT's folder was asked for, and the package safetensors is not installed",
            why="whale_nebula needs it for these folders alone, so it is an extra",
            mend="pip install 'whale-nebula[bert]'",
        ) from None
    return safetensors


def _check_there(folder: Path, name: str) -> None:
    if (folder / name).is_file():
        return
    if not folder.is_dir():
        raise WeightsError(f"there is no folder {str(folder)!r}", mend="load_bert(FOLDER) of a Hugging Face BERT")
    others = sorted(path.name for path in folder.iterdir())
    pickled = name == TENSORS and "pytorch_model.bin" in others
    raise WeightsError(
        f"the folder has no {name}",
        where=str(folder),
        why="its pytorch_model.bin is a pickle, and a pickle is code: it is not opened"
        if pickled
        else f"there is {', '.join(others) or 'nothing'}",
        mend=f"model.save_pretrained({str(folder)!r}) of transformers writes {name} beside it" if pickled else None,
    )


def _check_words(path: Path, rows: int) -> None:
    """A table may have more rows than there are words (some are padded to a round number), not fewer."""
    if not path.exists():
        return
    words = len(path.read_bytes().splitlines())
    if words > rows:
        raise WeightsError(
            f"vocab.txt has {words} words, and config.json says {rows}",
            where=str(path),
            why="each word has a row in the model's table",
            mend="take the vocab.txt that the model was trained with",
        )
