"""A library's model, Keras's MobileNet, trained by two clusters without changes: `nb.place` assigns its layers.

The images are stripes; the model predicts which of four directions they have.
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import whale_nebula as nb
from whale_nebula.strategies import by_parameters

ROWS, BATCH, SIDE = 128, 32, 32
LINE = "60mbit,20ms"


def stripes() -> tuple[np.ndarray, np.ndarray]:
    """Images, and the number of each image's direction; seeded, so that every run has the same images."""
    random = np.random.default_rng(0)
    direction = random.integers(0, 4, ROWS)
    angle, phase = direction * np.pi / 4, random.uniform(0, np.pi, ROWS)
    across, down = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    along = np.multiply.outer(np.cos(angle), across) + np.multiply.outer(np.sin(angle), down)
    image = np.sin(along + phase[:, None, None])
    return np.repeat(image[..., None], 3, axis=-1).astype("float32"), direction


def mobilenet() -> keras.Model:
    """A library's model, without any scopes."""
    keras.utils.set_random_seed(1)
    shape = (SIDE, SIDE, 3)
    model = keras.applications.MobileNet(shape, alpha=0.25, dropout=0.0, weights=None, classes=4)
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def main() -> int:
    """Place the model by a map, show the plan, and train; then pin that plan, and place the model differently."""
    x, y = stripes()
    nb.init(links=LINE)
    model = mobilenet()

    # Patterns match complete layer paths. Other layers, the activations and the pooling, run where it is cheapest.
    nb.place(model, {"conv1.*|conv_.w_[1-9](_bn)?": "gpu", "conv_.w_1[0-3](_bn)?|conv_preds": "npu"})
    plan = nb.plan(model, x[:BATCH], y[:BATCH])
    print(plan)
    loss = model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history["loss"][-1]
    print(f"\ntrained over a link of {LINE}: loss {loss:.4f}")
    for name, link in nb.last_report().links.items():
        print(f"{name}: {link.payload_bytes / 1e3:.0f} kB per step")

    # With a pinned plan, the same script with a different cut (here by a strategy) is refused before a step runs.
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        nb.shutdown()
        nb.init(links=LINE, plan=Path(folder) / "plan.json")
        nb.place(model, by_parameters(model, ["gpu", "npu"]))
        try:
            model.train_on_batch(x[:BATCH], y[:BATCH])
        except nb.errors.PlanMismatchError as refused:
            print(f"refused: {refused.why}")
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
