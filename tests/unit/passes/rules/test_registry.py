import pytest
import tensorflow as tf

from whale_nebula.passes.rules import FAMILIES
from whale_nebula.passes.rules.registry import RULES, Fold, Node, rule, whole


def test_rules_are_defined_in_family_modules() -> None:
    modules = {entry.apply.__module__ for entry in RULES.values()}
    assert modules == {family.__name__ for family in FAMILIES}


def test_second_rule_for_an_op_type_is_refused() -> None:
    with pytest.raises(ValueError, match="op type Sum has two rules"):

        @rule("Sum")
        def again(node: Node) -> Fold:
            return whole()


def test_rules_exist_only_for_tensorflow_ops() -> None:
    unknown = [name for name in RULES if not hasattr(tf.raw_ops, name) and not name.startswith("Xla")]
    assert unknown == ["_FusedBatchNormEx", "ReplicaSum"], f"these are no ops of TensorFlow {tf.__version__}"
