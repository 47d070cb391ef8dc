"""Two clusters as two processes on this machine: the script starts itself twice, and each process trains its half.

They exchange no graph, code or data, only the tensors at the cut.
"""

import keras
import numpy as np

import whale_nebula as nb
from whale_nebula.launch import attach, spawn

WORKERS = {"gpu/0": "gpu", "npu/0": "npu"}
DEADLINE = 300.0


def start() -> None:
    """Run as the launcher: start a process for each worker, and print their output as it arrives."""
    with spawn(["-m", "whale_nebula.launch.child", __file__], WORKERS, seed=1, echo=show) as job:
        job.wait(DEADLINE).check()


def show(worker: str, stream: str, line: str) -> None:
    """Print a worker's line with its name; errors are printed at the end, by `check`."""
    if stream == "out":
        print(f"{worker}: {line}", end="", flush=True)


def train() -> None:
    """Run as a worker; the code is the same as for one process."""
    inputs = keras.Input((16,))
    with nb.cluster(), nb.pipeline(micro_batch=4):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(64, activation="relu")(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")  # from here on it is plain Keras

    random = np.random.default_rng(0)  # seeded: both processes must have the same rows
    x = random.normal(size=(512, 16)).astype("float32")
    history = model.fit(x, x[:, :1] ** 2, epochs=4, shuffle=False, verbose=0).history

    weights = model.get_weights()  # collective: every process must call it, and gets all weights
    print(f"loss {history['loss'][-1]:.6f}, {sum(weight.size for weight in weights)} weights", flush=True)
    for name, link in nb.last_report().links.items():
        print(f"sent in the last step, {name}: {link.bytes} bytes", flush=True)
    if nb.here().lead:
        print("the lead process prints this once", flush=True)


if __name__ == "__main__":
    start() if attach() is None else train()
