"""Every pair of role and call, and every role that is called: what is not allowed by name is denied."""

import itertools

import pytest

from whale_nebula.errors import NotAllowedError
from whale_nebula.security import Identity
from whale_nebula.security.identity import ALLOWED, ROLES, Call, check_call, refusal

# (role, call, role that is called): "any" cluster, or "own" only; what is not here is denied
YES = {
    ("worker", Call.OPEN_PAIR, "worker"): "any",
    ("worker", Call.RELAY, "gateway"): "own",
    ("worker", Call.HEALTH, "worker"): "any",
    ("worker", Call.HEALTH, "gateway"): "any",
    ("worker", Call.HEALTH, "operator"): "any",
    ("gateway", Call.RELAY, "gateway"): "any",
    ("gateway", Call.HEALTH, "worker"): "any",
    ("gateway", Call.HEALTH, "gateway"): "any",
    ("gateway", Call.HEALTH, "operator"): "any",
    ("gateway", Call.AUDIT_HEADS, "gateway"): "any",
    ("operator", Call.HEALTH, "worker"): "any",
    ("operator", Call.HEALTH, "gateway"): "any",
    ("operator", Call.HEALTH, "operator"): "any",
}
MATRIX = list(itertools.product(ROLES, Call, ROLES, ("own", "other")))


@pytest.mark.parametrize(("role", "call", "here", "where"), MATRIX)
def test_the_whole_matrix(role: str, call: Call, here: str, where: str) -> None:
    caller = Identity("mt", "gpu", role, 0 if role == "gateway" else 1)
    if role == here == "gateway" and where == "own":
        return  # a cluster has one gateway: this would be itself
    called = Identity("mt", "gpu" if where == "own" else "npu", here)
    may = YES.get((role, call, here), "") in ("any", where)
    assert (not refusal(caller, call, called)) == may
    if not may:
        with pytest.raises(NotAllowedError) as told:
            check_call(caller, call, called)
        assert caller.worker in told.value.what
        assert call in told.value.what
        assert told.value.why


@pytest.mark.parametrize(("role", "call", "here"), list(itertools.product(ROLES, Call, ROLES)))
def test_of_another_run_nobody_may_anything(role: str, call: Call, here: str) -> None:
    assert refusal(Identity("other", "gpu", role), call, Identity("mt", "npu", here))


@pytest.mark.parametrize("call", [call for call in Call if call != Call.HEALTH])
def test_who_comes_with_our_own_name_is_denied(call: Call) -> None:
    for role in ROLES:
        one = Identity("mt", "gpu", role)
        assert refusal(one, call, one)


def test_the_table_names_only_roles_and_calls_that_there_are() -> None:
    assert {role for role, _ in ALLOWED} == set(ROLES)
    assert {call for _, call in ALLOWED} == set(Call)
