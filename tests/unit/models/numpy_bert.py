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
        prefix = f"encoder.layer.{number}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= dense_shapes(f"{prefix}.attention.{name}", width, width)
        shapes |= dense_shapes(f"{prefix}.intermediate.dense", width, inner)
        shapes |= dense_shapes(f"{prefix}.output.dense", inner, width)
        shapes |= norm_shapes(f"{prefix}.attention.ln" if pre else f"{prefix}.attention.output.LayerNorm", width)
        shapes |= norm_shapes(f"{prefix}.ln" if pre else f"{prefix}.output.LayerNorm", width)
    random = np.random.default_rng(0)
    return {name: random.normal(0, 0.5, shape).astype("float32") for name, shape in shapes.items()}


def dense_shapes(prefix: str, input_width: int, output_width: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.weight": (output_width, input_width), f"{prefix}.bias": (output_width,)}


def norm_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.weight": (width,), f"{prefix}.bias": (width,)}


def head_tensors(vocabulary: int = 23, width: int = 8) -> Tensors:
    """Those of the head that guesses tokens."""
    prefix = "cls.predictions"
    shapes = dense_shapes(f"{prefix}.transform.dense", width, width) | norm_shapes(
        f"{prefix}.transform.LayerNorm", width
    )
    random = np.random.default_rng(1)
    return {name: random.normal(0, 0.5, shape) for name, shape in {**shapes, f"{prefix}.bias": (vocabulary,)}.items()}


def hidden_states(tensors: Tensors, tokens: np.ndarray, heads: int, *, pre: bool = False) -> np.ndarray:
    """What BERT makes of rows of tokens of which 0 is none: in double precision, one row after the other."""
    tensors = {name: tensor.astype("float64") for name, tensor in tensors.items()}
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("encoder.layer"))
    return np.stack([encode_row(tensors, row, heads, layers, pre) for row in tokens])


def encode_row(tensors: Tensors, row: np.ndarray, heads: int, layers: int, pre: bool) -> np.ndarray:
    hidden = tensors["embeddings.word_embeddings.weight"][row]
    hidden = hidden + tensors["embeddings.position_embeddings.weight"][: len(row)]
    hidden = hidden + tensors["embeddings.token_type_embeddings.weight"][0]
    if not pre:
        hidden = norm(tensors, "embeddings.LayerNorm", hidden)
    for number in range(layers):
        prefix = f"encoder.layer.{number}"
        if pre:
            hidden = hidden + compute_attention(
                tensors, prefix, norm(tensors, f"{prefix}.attention.ln", hidden), row != 0, heads
            )
            hidden = hidden + compute_feed_forward(tensors, prefix, norm(tensors, f"{prefix}.ln", hidden))
        else:
            summed = hidden + compute_attention(tensors, prefix, hidden, row != 0, heads)
            hidden = norm(tensors, f"{prefix}.attention.output.LayerNorm", summed)
            hidden = norm(tensors, f"{prefix}.output.LayerNorm", hidden + compute_feed_forward(tensors, prefix, hidden))
    return norm(tensors, "encoder.ln", hidden) if pre else hidden


def compute_attention(tensors: Tensors, prefix: str, read: np.ndarray, there: np.ndarray, heads: int) -> np.ndarray:
    query, key, value = (
        np.split(dense(tensors, f"{prefix}.attention.self.{name}", read), heads, axis=-1)
        for name in ("query", "key", "value")
    )
    taken = []
    for q, k, v in zip(query, key, value, strict=True):
        weights = np.exp(q @ k.T / math.sqrt(q.shape[-1])) * there
        taken.append(weights / weights.sum(axis=-1, keepdims=True) @ v)
    return dense(tensors, f"{prefix}.attention.output.dense", np.concatenate(taken, axis=-1))


def compute_feed_forward(tensors: Tensors, prefix: str, read: np.ndarray) -> np.ndarray:
    return dense(tensors, f"{prefix}.output.dense", gelu(dense(tensors, f"{prefix}.intermediate.dense", read)))


def logits(tensors: Tensors, hidden: np.ndarray) -> np.ndarray:
    """The head: every token's score at every place."""
    prefix = "cls.predictions"
    guess = norm(tensors, f"{prefix}.transform.LayerNorm", gelu(dense(tensors, f"{prefix}.transform.dense", hidden)))
    return guess @ tensors["embeddings.word_embeddings.weight"].T + tensors[f"{prefix}.bias"]


def dense(tensors: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[f"{prefix}.weight"].T + tensors[f"{prefix}.bias"]


def norm(tensors: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON)
    return centred / scale * tensors[f"{prefix}.weight"] + tensors[f"{prefix}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
