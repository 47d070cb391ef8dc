"""Parity as DESIGN fixes it: losses and first gradients within 1e-5 in norm, weights within 1e-3 of a step's length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.parity.zoo import Outcome, Trial


def assert_parity(plain: Outcome, cut: Outcome, trial: Trial) -> None:
    """Everything that the two runs left is the same."""
    assert sorted(plain.history) == sorted(cut.history)
    for name, values in plain.history.items():
        np.testing.assert_allclose(cut.history[name], values, rtol=1e-5, atol=1e-8, err_msg=name)
    np.testing.assert_allclose(cut.losses, plain.losses, rtol=1e-5, atol=1e-8)
    _close(plain.gradients, cut.gradients, 1e-5, 1e-5 * 1e-3 * _largest(plain.gradients))
    _close(plain.weights, cut.weights, 1e-5, 1e-3 * trial.rate * trial.steps)
    _close(plain.outputs, cut.outputs, 1e-5, 1e-6)


def _largest(tensors: Sequence[np.ndarray]) -> float:
    return max((float(np.linalg.norm(t)) for t in tensors), default=0.0)


def _close(expected: Sequence[np.ndarray], found: Sequence[np.ndarray], relative: float, absolute: float) -> None:
    assert len(expected) == len(found)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= relative * np.linalg.norm(a) + absolute, (number, a.shape, np.abs(a - b).max())
