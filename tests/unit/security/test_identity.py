"""Names in certificates, and the permissions of each role: all others are denied."""

import itertools
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from whale_nebula.errors import IdentityError, NotAllowedError
from whale_nebula.security import Identity
from whale_nebula.security.identity import PERMISSIONS, ROLES, Call, check_call, explain_refusal

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}", fullmatch=True)
IDENTITIES = st.one_of(
    st.builds(Identity, NAMES, NAMES, st.sampled_from(["worker", "operator", "auditor"]), st.integers(0, 99999)),
    st.builds(Identity, NAMES, NAMES, st.just("gateway")),
)


@given(IDENTITIES)
def test_identity_survives_uri_and_worker_round_trip(one: Identity) -> None:
    assert Identity.parse(one.uri) == one
    assert Identity.of_worker(one.run, one.worker) == one


@given(IDENTITIES, IDENTITIES)
def test_different_identities_have_different_names(one: Identity, other: Identity) -> None:
    same = one == other
    assert ((one.uri == other.uri), (one.dns == other.dns)) == (same, same)
    if one.run == other.run:
        assert ((one.worker == other.worker), (one.stem == other.stem)) == (same, same)


def test_cluster_name_cannot_collide_with_files_of_another() -> None:
    assert Identity("mt", "gpu-worker-0").stem != Identity("mt", "gpu").stem
    assert Identity("mt", "gpu-operator", "worker", 1).stem != Identity("mt", "gpu", "operator", 1).stem


@given(st.text(alphabet=string.printable + "äé\0\u2028", max_size=40))
@example("nebula://mt/gpu/worker/0\n")
@example("nebula://mt/../worker/0")
@example("nebula://mt/gpu/worker/00")
@example("nebula://mt/gpu/worker/-1")
@example("nebula://mt/gpu/worker/100000")
@example("nebula://mt/gpu/gateway/1")
@example("nebula://mt/gpu/root/0")
@example("nebula:///gpu/worker/0")
@example("nebula://mt/gpu/worker/0/..")
@example("nebula://mt/gpu%2f/worker/0")
@example("nebula://m" + "t" * 48 + "/gpu/worker/0")
def test_invalid_identity_uri_is_refused(text: str) -> None:
    with pytest.raises(IdentityError):
        Identity.parse(text)


@given(IDENTITIES)
def test_identity_stem_stays_in_its_folder(one: Identity) -> None:
    assert "/" not in one.stem
    assert not one.stem.startswith((".", "-"))


@pytest.mark.parametrize("worker", ["gpu", "gpu/", "gpu/x", "gpu/0/0", "../0", "/0", "gpu/operator", "gpu/0\n"])
def test_invalid_worker_name_is_refused(worker: str) -> None:
    with pytest.raises(IdentityError):
        Identity.of_worker("mt", worker)


def test_invalid_name_error_suggests_a_valid_name() -> None:
    with pytest.raises(IdentityError, match="run: my-run") as caught:
        Identity("my run!", "gpu")
    assert "my run!" in caught.value.what


# (role, call, role that is called): "any" cluster, or "own" only; all others are denied
ALLOWED_CALLS = {
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
    ("auditor", Call.REPORT, "operator"): "own",
}
MATRIX = list(itertools.product(ROLES, Call, ROLES, ("own", "other")))


def test_call_permissions_match_the_table_for_all_roles() -> None:
    for role, call, here, where in MATRIX:
        if role == here == "gateway" and where == "own":
            continue  # a cluster has one gateway, which does not call itself
        caller = Identity("mt", "gpu", role, 0 if role == "gateway" else 1)
        called = Identity("mt", "gpu" if where == "own" else "npu", here)
        may = ALLOWED_CALLS.get((role, call, here), "") in ("any", where)
        assert (not explain_refusal(caller, call, called)) == may, (role, call, here, where)
        if not may:
            with pytest.raises(NotAllowedError) as caught:
                check_call(caller, call, called)
            assert caller.worker in caught.value.what
            assert call in caught.value.what
            assert caught.value.why


def test_caller_of_another_run_is_denied() -> None:
    for role, call, here in itertools.product(ROLES, Call, ROLES):
        assert explain_refusal(Identity("other", "gpu", role), call, Identity("mt", "npu", here)), (role, call, here)


@pytest.mark.parametrize("call", [call for call in Call if call != Call.HEALTH])
def test_caller_with_own_identity_is_denied(call: Call) -> None:
    for role in ROLES:
        one = Identity("mt", "gpu", role)
        assert explain_refusal(one, call, one)


def test_permission_table_covers_all_roles_and_calls() -> None:
    assert {role for role, _ in PERMISSIONS} == set(ROLES)
    assert {call for _, call in PERMISSIONS} == set(Call)
