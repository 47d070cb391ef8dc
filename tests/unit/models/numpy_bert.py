"""BERT in NumPy from the tensors of a Hugging Face folder: the reference of the Keras model.

Written from the papers' formulas and Hugging Face's names, independently of the Keras model.
"""

import math

import numpy as np

Tensors = dict[str, np.ndarray]
EPSILON = 1e-12  # of `layer_norm_eps`


def bert_tensors(
    vocabulary: int = 23, length: int = 10, width: int = 8, layers: int = 2, inner: int = 12, *, pre: bool = False
) -> Tensors:
    """Random tensors of a BERT, by Hugging Face's names."""
    shapes = {
        "embeddings.word_embeddings.weight": (vocabulary, width),
        "embeddings.position_embeddings.weight": (length, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    shapes |= norm_shapes("encoder.ln" if pre else "embeddings.LayerNorm", width)
    for number in range(layers):
        at = f"encoder.layer.{number}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= dense_shapes(f"{at}.attention.{name}", width, width)
        shapes |= dense_shapes(f"{at}.intermediate.dense", width, inner)
        shapes |= dense_shapes(f"{at}.output.dense", inner, width)
        shapes |= norm_shapes(f"{at}.attention.ln" if pre else f"{at}.attention.output.LayerNorm", width)
        shapes |= norm_shapes(f"{at}.ln" if pre else f"{at}.output.LayerNorm", width)
    random = np.random.default_rng(0)
    return {name: random.normal(0, 0.5, shape).astype("float32") for name, shape in shapes.items()}


def dense_shapes(at: str, come: int, go: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.weight": (go, come), f"{at}.bias": (go,)}


def norm_shapes(at: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.weight": (width,), f"{at}.bias": (width,)}


def head_tensors(vocabulary: int = 23, width: int = 8) -> Tensors:
    """Those of the head that guesses tokens."""
    at = "cls.predictions"
    shapes = dense_shapes(f"{at}.transform.dense", width, width) | norm_shapes(f"{at}.transform.LayerNorm", width)
    random = np.random.default_rng(1)
    return {name: random.normal(0, 0.5, shape) for name, shape in {**shapes, f"{at}.bias": (vocabulary,)}.items()}


def hidden_states(tensors: Tensors, tokens: np.ndarray, heads: int, *, pre: bool = False) -> np.ndarray:
    """What BERT makes of rows of tokens of which 0 is none: in double precision, one row after the other."""
    tensors = {name: tensor.astype("float64") for name, tensor in tensors.items()}
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("encoder.layer"))
    return np.stack([one_row(tensors, row, heads, layers, pre) for row in tokens])


def one_row(tensors: Tensors, row: np.ndarray, heads: int, layers: int, pre: bool) -> np.ndarray:
    hidden = tensors["embeddings.word_embeddings.weight"][row]
    hidden = hidden + tensors["embeddings.position_embeddings.weight"][: len(row)]
    hidden = hidden + tensors["embeddings.token_type_embeddings.weight"][0]
    if not pre:
        hidden = norm(tensors, "embeddings.LayerNorm", hidden)
    for number in range(layers):
        at = f"encoder.layer.{number}"
        if pre:
            hidden = hidden + attended(tensors, at, norm(tensors, f"{at}.attention.ln", hidden), row != 0, heads)
            hidden = hidden + widened(tensors, at, norm(tensors, f"{at}.ln", hidden))
        else:
            summed = hidden + attended(tensors, at, hidden, row != 0, heads)
            hidden = norm(tensors, f"{at}.attention.output.LayerNorm", summed)
            hidden = norm(tensors, f"{at}.output.LayerNorm", hidden + widened(tensors, at, hidden))
    return norm(tensors, "encoder.ln", hidden) if pre else hidden


def attended(tensors: Tensors, at: str, read: np.ndarray, there: np.ndarray, heads: int) -> np.ndarray:
    query, key, value = (
        np.split(dense(tensors, f"{at}.attention.self.{name}", read), heads, axis=-1)
        for name in ("query", "key", "value")
    )
    taken = []
    for q, k, v in zip(query, key, value, strict=True):
        weights = np.exp(q @ k.T / math.sqrt(q.shape[-1])) * there
        taken.append(weights / weights.sum(axis=-1, keepdims=True) @ v)
    return dense(tensors, f"{at}.attention.output.dense", np.concatenate(taken, axis=-1))


def widened(tensors: Tensors, at: str, read: np.ndarray) -> np.ndarray:
    return dense(tensors, f"{at}.output.dense", gelu(dense(tensors, f"{at}.intermediate.dense", read)))


def logits(tensors: Tensors, hidden: np.ndarray) -> np.ndarray:
    """The head: every token's score at every place."""
    at = "cls.predictions"
    guess = norm(tensors, f"{at}.transform.LayerNorm", gelu(dense(tensors, f"{at}.transform.dense", hidden)))
    return guess @ tensors["embeddings.word_embeddings.weight"].T + tensors[f"{at}.bias"]


def dense(tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[f"{at}.weight"].T + tensors[f"{at}.bias"]


def norm(tensors: Tensors, at: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON)
    return centred / scale * tensors[f"{at}.weight"] + tensors[f"{at}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
