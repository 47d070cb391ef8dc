"""Python inside a step: what it makes of rows, nobody knows."""

from __future__ import annotations

from whale_nebula.passes.reduce.registry import Result, Site, rule


@rule("EagerPyFunc", "PyFunc", "PyFuncStateless")
def python(site: Site) -> Result:
    """It sees one micro-batch at a time."""
    called = "tf.py_function" if site.op.type == "EagerPyFunc" else "tf.numpy_function"
    return site.coupled(f"{called} runs Python, which may do anything to the rows that it is given")
