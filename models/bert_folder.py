"""Read and write a BERT as a Hugging Face folder: `config.json`, `model.safetensors`, `vocab.txt`.

None of these files contains code. `safetensors` reads and writes them; it comes with the extra `bert`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np

from whale_nebula.errors import ConfigError, WeightsError

from .bert import Bert, BertSizes, make_config, read_sizes
from .masked_lm import MaskedLm, masked_lm

if TYPE_CHECKING:
    from .text.vocabulary import Vocabulary


CONFIG, TENSORS, WORDS = "config.json", "model.safetensors", "vocab.txt"
log = logging.getLogger("whale_nebula.models.bert_folder")


def load_bert(folder: str | Path, *, name: str = "bert", weights: bool = True) -> Bert:
    """Load a BERT from a Hugging Face folder; of a model for a task, only the encoder.

    Args:
        folder: folder with `config.json` and `model.safetensors`.
        name: prefix of the layers' names. Two BERTs in one model need different names.
        weights: False reads only the sizes from `config.json`, for a cluster that does not run this BERT.
    """
    folder = Path(folder)
    bert = Bert(_read_folder_sizes(folder), name=name)
    if weights:
        _fill_places(folder, list_places(bert))
    return bert


def load_masked_lm(folder: str | Path, *, name: str = "bert") -> MaskedLm:
    """Load a BERT from a Hugging Face folder with its head for masked language modelling, to continue pretraining.

    Args:
        folder: folder with `config.json` and `model.safetensors`.
        name: prefix of the layers' names.
    """
    folder = Path(folder)
    model = masked_lm(Bert(_read_folder_sizes(folder), name=name))
    _fill_places(folder, list_places(model.bert) | list_head_places(model))
    return model


def save_bert(model: Bert | MaskedLm, folder: str | Path, vocabulary: Vocabulary) -> None:
    """Write a BERT and its vocabulary to a folder in Hugging Face's format.

    Args:
        model: a `Bert`, or a `masked_lm`, of which the head is written too.
        folder: folder for `config.json`, `model.safetensors` and `vocab.txt`.
        vocabulary: the vocabulary of the model.
    """
    from .text.vocabulary import write_vocabulary  # reading a folder does not need it

    bert = model.bert if isinstance(model, MaskedLm) else model
    vocabulary.check_fits(bert.sizes.vocabulary, padded=True)
    places, architecture = list_places(bert), "BertModel"
    if isinstance(model, MaskedLm):
        places = {f"{PREFIX}{name}": place for name, place in places.items()} | list_head_places(model)
        architecture = "BertForMaskedLM"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: place.read_numbers() for name, place in places.items()}
    _import_safetensors().numpy.save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(make_config(bert.sizes, architecture), indent=2) + "\n", "utf-8")
    write_vocabulary(vocabulary, folder / WORDS)


def _read_folder_sizes(folder: Path) -> BertSizes:
    path = folder / CONFIG
    _check_exists(folder, CONFIG)
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise WeightsError(f"config.json cannot be read: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise WeightsError("config.json is not a JSON object", where=str(path))
    sizes = read_sizes(config, str(path))
    _check_words(folder / WORDS, sizes.vocabulary)
    return sizes


def _fill_places(folder: Path, places: dict[str, Place]) -> None:
    """Assign every variable its tensor, after all have been checked."""
    path = folder / TENSORS
    _check_exists(folder, TENSORS)
    with _open_tensors(path) as file:
        names = plain_names(file.keys())
        check_fit(places, {name: tuple(file.get_slice(names[name]).get_shape()) for name in names}, str(path))
        if left_out := sorted(set(names) - set(places)):
            log.info("%s: not loaded, as they are not part of the model: %s", path, ", ".join(left_out))
        for name, place in places.items():
            place.fill(np.asarray(file.get_tensor(names[name]), "float32"))


def _open_tensors(path: Path) -> Any:
    safetensors = _import_safetensors()
    try:
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise WeightsError(
            f"model.safetensors cannot be read: {error}",
            where=str(path),
            mend="download it again; without git-lfs, git stores a short text file in its place",
        ) from None


def _import_safetensors() -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError:
        raise ConfigError(
            "loading a BERT from a folder requires the package safetensors, which is not installed",
            why="it is an optional dependency, used only for these folders",
            mend="pip install 'whale-nebula[bert]'",
        ) from None
    return safetensors


def _check_exists(folder: Path, name: str) -> None:
    if (folder / name).is_file():
        return
    if not folder.is_dir():
        raise WeightsError(f"there is no folder {str(folder)!r}", mend="load_bert(FOLDER) of a Hugging Face BERT")
    others = sorted(path.name for path in folder.iterdir())
    pickled = name == TENSORS and "pytorch_model.bin" in others
    raise WeightsError(
        f"the folder does not contain {name}",
        where=str(folder),
        why="pytorch_model.bin is a pickle file, which can execute code, so it is not opened"
        if pickled
        else f"it contains {', '.join(others) or 'nothing'}",
        mend=f"model.save_pretrained({str(folder)!r}) of transformers writes {name} next to it" if pickled else None,
    )


def _check_words(path: Path, rows: int) -> None:
    """Check the number of a table's rows: at least the number of words, as some tables are padded to a round number."""
    if not path.exists():
        return
    words = len(path.read_bytes().splitlines())
    if words > rows:
        raise WeightsError(
            f"vocab.txt has {words} words, but config.json specifies {rows}",
            where=str(path),
            why="each word corresponds to a row of the model's embedding table",
            mend="use the vocab.txt that the model was trained with",
        )


PREFIX = "bert."
_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}  # of norms, in files that were converted from TensorFlow
_SHOWN = 3


class Place(NamedTuple):
    """A variable, and whether its tensor is transposed in the file, as PyTorch stores dense kernels."""

    variable: Any
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        shape = tuple(self.variable.shape)
        return shape[::-1] if self.is_transposed else shape

    def fill(self, tensor: np.ndarray) -> None:
        """Assign the variable from a tensor of the file."""
        self.variable.assign(tensor.T if self.is_transposed else tensor)

    def read_numbers(self) -> np.ndarray:
        """The variable's value in the layout of the file."""
        numbers = np.asarray(keras.ops.convert_to_numpy(self.variable))
        return np.ascontiguousarray(numbers.T if self.is_transposed else numbers)


def list_places(bert: Bert) -> dict[str, Place]:
    """Every variable of a BERT by the name of its tensor, without prefix.

    >>> from whale_nebula.models.bert import BertSizes
    >>> bert = Bert(BertSizes(vocabulary=11, length=6, width=8, heads=2, layers=1, inner=16))
    >>> list_places(bert)["encoder.layer.0.intermediate.dense.weight"].shape
    (16, 8)
    """
    table, pre = bert.embedding, bert.ending is not None
    found = {
        "embeddings.word_embeddings.weight": Place(table.tokens.embeddings),
        "embeddings.position_embeddings.weight": Place(table.positions.embeddings),
        "embeddings.token_type_embeddings.weight": Place(table.types.embeddings),
    }
    found |= {} if table.norm is None else _norm_places("embeddings.LayerNorm", table.norm)
    for number, (attention, inner) in enumerate(bert.sub_layers):
        at = f"encoder.layer.{number}"
        heads = attention.attention
        for name, layer in (("query", heads.query), ("key", heads.key), ("value", heads.value)):
            found |= _dense_places(f"{at}.attention.self.{name}", layer)
        found |= _dense_places(f"{at}.attention.output.dense", heads.out)
        found |= _norm_places(f"{at}.attention.ln" if pre else f"{at}.attention.output.LayerNorm", attention.norm)
        found |= _dense_places(f"{at}.intermediate.dense", inner.wide)
        found |= _dense_places(f"{at}.output.dense", inner.narrow)
        found |= _norm_places(f"{at}.ln" if pre else f"{at}.output.LayerNorm", inner.norm)
    return found | ({} if bert.ending is None else _norm_places("encoder.ln", bert.ending))


def list_head_places(model: MaskedLm) -> dict[str, Place]:
    """The variables of the head for masked language modelling by tensor; its table is BERT's own."""
    at = "cls.predictions"
    transform = _dense_places(f"{at}.transform.dense", model.guess.dense)
    norm = _norm_places(f"{at}.transform.LayerNorm", model.guess.norm)
    return {**transform, **norm, f"{at}.bias": Place(model.bias.bias)}


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """The names of tensors in a file, by their current names without prefix.

    >>> plain_names(["bert.embeddings.LayerNorm.gamma", "cls.predictions.bias"])
    {'embeddings.LayerNorm.weight': 'bert.embeddings.LayerNorm.gamma', 'cls.predictions.bias': 'cls.predictions.bias'}
    """
    return {_current_name(name.removeprefix(PREFIX)): name for name in names}


def check_fit(places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse tensors that do not match the variables: missing, left over, or of another shape.

    Tensors outside the encoder, such as a pooler or a head, are ignored.
    """
    missing = [name for name in places if name not in shapes]
    extra = [name for name in shapes if name not in places and _belongs(name)]
    wrong = [
        f"{name} {shapes[name]}, not {place.shape}"
        for name, place in places.items()
        if name in shapes and shapes[name] != place.shape
    ]
    for what, names in (("lacks", missing), ("has tensors that config.json does not imply:", extra)):
        if names:
            raise WeightsError(f"model.safetensors {what} {_join_some(names)}", where=where, why=_WHY)
    if wrong:
        raise WeightsError(f"shapes in model.safetensors do not match config.json: {_join_some(wrong)}", where=where)


_WHY = "config.json determines the tensors of the model"


def _belongs(name: str) -> bool:
    return name.startswith(("embeddings.", "encoder.")) and name != "embeddings.position_ids"


def _join_some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _current_name(name: str) -> str:
    for old, new in _OLD_ENDINGS.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _dense_places(at: str, layer: Any) -> dict[str, Place]:
    return {f"{at}.weight": Place(layer.kernel, is_transposed=True), f"{at}.bias": Place(layer.bias)}


def _norm_places(at: str, layer: Any) -> dict[str, Place]:
    return {f"{at}.weight": Place(layer.gamma), f"{at}.bias": Place(layer.beta)}
