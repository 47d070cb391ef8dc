"""Two gateways between two clusters, with real TLS on loopback: relaying, refusals, liveness and logs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.unit.gateway.town import CLUSTERS, GPU, NPU, QUICK, RUN, SOON, Town, certificates, key, records, town, until
from tests.unit.transport.crossing import Certificates
from whale_nebula.errors import (
    DeadlineError,
    IdentityError,
    LinkClosedError,
    TransportError,
    WrongNameError,
)
from whale_nebula.gateway import control
from whale_nebula.gateway.gateway import Gateway
from whale_nebula.gateway.relay import Side
from whale_nebula.gateway.route import Route
from whale_nebula.gateway.site import Site
from whale_nebula.security import Credentials, CurrentCredentials, Files
from whale_nebula.security import files as security_files
from whale_nebula.security.audit import Head, read_heads
from whale_nebula.security.issue import renew, revoke
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.connection import Connection, Lane
from whale_nebula.transport.grpc.dialling import Target, dial
from whale_nebula.transport.grpc.limits import Buckets
from whale_nebula.transport.grpc.listener import Knock
from whale_nebula.transport.grpc.options import channel_credentials
from whale_nebula.transport.protocol import Packed
from whale_nebula.wire.frame import Flag, Header, Kind, pack

OTHER = "npu/1"
ALL = (GPU, NPU, "gpu/gateway", "npu/gateway")
IMPATIENT = replace(QUICK, patience=3.0)
PAIRS = {"gpu": (GPU, NPU), "npu": (NPU, GPU)}


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Files]]:
    with certificates(GPU, NPU, OTHER, "npu/7", "gpu/operator-0") as made:
        yield made


@pytest.fixture
def make(tmp_path: Path, files: dict[str, Files]) -> Iterator[Callable[..., Town]]:
    """A town of which gateways run; where they have `met`, workers too."""
    with contextlib.ExitStack() as stack:

        def one(**options: Any) -> Town:
            met = options.pop("met", False)
            made = stack.enter_context(town(tmp_path, options.pop("files", files), **options))
            made.start()
            if met:
                made.join()
                made.meet()
            return made

        yield one


def call(made: Town, credentials: Credentials, knock: Knock, lane: Lane | None = None, *, gateway: bool = True) -> Lane:
    """A stream to gpu's gateway."""
    lane = lane or Lane()
    aim = Target.of(RUN, "gpu/gateway", made.sites["gpu"].listen, CurrentCredentials(credentials), gateway=gateway)
    dial(aim, knock, lane, lambda frame: None, deadlines=QUICK)
    return lane


def actions(site: Site, *names: str) -> list[dict[str, Any]]:
    """The records of these actions."""
    return [each for each in records(site) if each["action"] in names]


class TestWhatCrosses:
    @pytest.mark.parametrize("dials", [CLUSTERS, ("gpu",), pytest.param(("npu",), marks=pytest.mark.grid)])
    def test_either_gateway_may_dial(self, make: Callable[..., Town], dials: tuple[str, ...]) -> None:
        made = make(dials=dials, met=True)
        made.cross(range(3), size=1 << 19)
        fars = [made.gateways[one]._pair(*pair).half(Side.FAR) for one, pair in PAIRS.items()]
        assert sorted(half.dialled for half in fars if half is not None) == [False, True]

    def test_an_address_that_leads_nowhere_keeps_nobody_waiting(self, tmp_path: Path, files: dict[str, Files]) -> None:
        """Its own attempts have precedence, each takes until `connect`, and the other gateway dials meanwhile."""
        hole = socket.create_server(("127.0.0.1", 0))  # it takes connections and says nothing
        nowhere = f"127.0.0.1:{hole.getsockname()[1]}"
        with hole, town(tmp_path, files, deadlines=replace(QUICK, connect=SOON)) as made:
            made.start("gpu")
            made.start("npu", gateways={"gpu": nowhere})
            made.join()
            began = time.monotonic()
            made.meet()
            assert time.monotonic() - began < SOON / 2
            made.cross(range(3))

    def test_what_a_codec_made_crosses_sealed_as_it_was(self, make: Callable[..., Town]) -> None:
        made = make(met=True)
        packed = Packed(np.arange(200, dtype=np.uint8), codec=3, state=9, dtype="float32", dims=(10, 64))
        made.link(GPU, NPU).send(key(0), packed)
        again = made.link(NPU, GPU).receive(key(0), SOON)
        assert isinstance(again, Packed) and again[1:] == packed[1:] and again.data.tolist() == packed.data.tolist()

    def test_several_connections_where_the_host_does_not_run_bbr(
        self, make: Callable[..., Town], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(options, "lanes", lambda: 4)
        made = make(met=True)
        halves = [made.gateways[one]._pair(*pair).half(side) for one, pair in PAIRS.items() for side in Side]
        until(lambda: all(half is not None and len(half.connection._lanes) == 4 for half in halves))
        made.cross(range(5), size=1 << 20)

    def test_who_comes_first_waits_at_its_own_gateway(self, make: Callable[..., Town]) -> None:
        made = make()
        made.join(GPU)
        until(lambda: made.gateways["gpu"]._pair(GPU, NPU).half(Side.NEAR))
        assert not made.gateways["npu"]._list_pairs()
        made.join(NPU)
        made.meet()

    def test_a_paced_line_is_no_faster_than_its_rate(self, make: Callable[..., Town]) -> None:
        made = make(rate=4e6, met=True)
        made.cross(range(1))
        waited: list[float] = []

        def wait(wakes: threading.Condition, seconds: float | None) -> None:
            waited.append(seconds or 0.0)
            wakes.wait(seconds)

        made.gateways["gpu"]._routes["npu"].pacer._wait = wait
        began = time.monotonic()
        made.cross(range(1, 4), size=1 << 17)
        assert sum(waited) > 0  # how long depends on what else this machine has to do
        assert time.monotonic() - began > 0.2


class TestWhatBreaks:
    def test_a_worker_that_connects_anew_breaks_the_old_streams(self, make: Callable[..., Town]) -> None:
        made = make(met=True)
        made.link()._carrier.drop("a test")
        made.cross(range(2))
        assert {each["side"] for each in actions(made.sites["gpu"], "end")} == {"near", "far"}

    def test_a_worker_that_is_killed_is_named_to_the_other_at_once(self, make: Callable[..., Town]) -> None:
        made = make(met=True)
        until(lambda: NPU in made.gateways["npu"]._liveness._open)
        made.kill(NPU)
        with pytest.raises(LinkClosedError, match="worker 'npu/0' is gone: its gateway reports") as raised:
            made.link().receive(key(0, NPU, GPU), SOON)
        assert "refused twice" in str(raised.value)
        [gone] = actions(made.sites["npu"], "gone")
        assert (gone["object"], gone["state"]) == (NPU, "dead")

    def test_a_worker_that_is_started_again_begins_without_the_past(self, make: Callable[..., Town]) -> None:
        made = make(met=True)
        until(lambda: all(worker in made.gateways[worker[:3]]._liveness._open for worker in (GPU, NPU)))
        made.kill(NPU)
        made.kill(GPU)
        until(lambda: all(worker in made.gateways[worker[:3]]._final_errors._gone for worker in (GPU, NPU)))
        made.join()
        made.meet()


class TestWhatIsSaid:
    def test_of_a_gateway_that_is_not_there_to_people_and_to_workers_that_wait(
        self, tmp_path: Path, files: dict[str, Files], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A worker that came before this was known asks again, and is told as it comes in."""
        with town(tmp_path, files) as made:
            made.start("gpu")
            made.join(GPU)
            known = "it is reached through the gateway: gateway 'gpu/gateway' cannot reach gateway 'npu/gateway': "
            until(lambda: made.link()._carrier.state().trouble.startswith(known))
            assert made.link()._carrier.state().connected
            # The log has it when the gateway looks at its routes next: a worker that asks may know it before.
            waits = f"waiting for gateway 'npu/gateway' at {made.sites['npu'].listen}, "
            until(lambda: any(each.startswith(waits) for each in caplog.messages))
            assert not any(" of " in each for each in caplog.messages if each.startswith(waits))
            with pytest.raises(DeadlineError, match="worker 'npu/0' did not connect within 0 s") as raised:
                made.link().take("SESSION", 0.0)
            assert raised.value.why.startswith(known)
            made.start("npu")
            made.join(NPU)
            made.meet()
            assert made.link()._carrier.state().trouble == ""
            until(lambda: any(each.startswith("gateway 'npu/gateway' is connected, after") for each in caplog.messages))

    def test_of_workers_that_end_in_order_nothing_bad(self, make: Callable[..., Town]) -> None:
        made = make(met=True)
        until(lambda: all(worker in made.gateways[worker[:3]]._liveness._open for worker in (GPU, NPU)))
        made.cross(range(2))
        made.leave()

        until(lambda: all(any(e["side"] == "near" for e in actions(made.sites[one], "end")) for one in CLUSTERS))
        until(lambda: not any(thread.name.startswith("nebula-liveness") for thread in threading.enumerate()))
        said = [each["action"] for one in CLUSTERS for each in actions(made.sites[one], "gone", "final", "left")]
        assert said == ["left"] * 2


class TestWhatIsRefused:
    def test_its_own_files_where_they_are_another_gateways(self, tmp_path: Path, files: dict[str, Files]) -> None:
        theirs, audit = files["npu/gateway"], tmp_path / "a.jsonl"
        made = Site(RUN, "gpu", "127.0.0.1:0", {}, {"npu": None}, files=theirs, audit=audit)
        with pytest.raises(WrongNameError, match="this process is gpu/gateway, but its certificate is for npu/gateway"):
            Gateway(made)

    @pytest.mark.parametrize(
        ("who", "source", "destination", "why"),
        [
            (NPU, NPU, GPU, "expected npu/gateway"),  # a worker of another cluster
            (GPU, "gpu/1", NPU, "expected gpu/1"),  # says that it is another one
            (GPU, GPU, "gpu/0", "this gateway does not relay frames of"),
            (GPU, GPU, "tpu/0", "this gateway does not relay frames of"),
            (GPU, GPU, "npu/1", "this gateway does not relay frames of"),
            (GPU, GPU, "npu/gateway", "this gateway does not relay frames of"),
            ("npu/gateway", "npu/0", "npu/0", "this gateway does not relay frames of"),
            ("npu/gateway", GPU, NPU, "expected gpu/0"),
            ("gpu/operator-0", "gpu/operator-0", NPU, "is not allowed to call: relay"),
            (NPU, "npu/gateway", "gpu/gateway", "expected npu/gateway"),
        ],
    )
    def test_by_identity_and_policy(
        self, make: Callable[..., Town], files: dict[str, Files], who: str, source: str, destination: str, why: str
    ) -> None:
        made = make(dials=())
        with pytest.raises(IdentityError) as raised:
            call(made, Credentials.load(files[who]), Knock(RUN, source, destination, "00112233aabbccdd"))
        assert why in raised.value.what
        [refused] = actions(made.sites["gpu"], "refuse")
        assert (refused["decision"], refused["times"]) == ("deny", 1)
        assert why in refused["reason"]

    def test_refusals_in_numbers_are_a_few_records_that_count_all(
        self, tmp_path: Path, make: Callable[..., Town]
    ) -> None:
        home = Certificates(tmp_path / "home")
        home.issue(GPU, "gpu/7", "gpu/gateway", "npu/gateway")
        names = (GPU, "gpu/7", *ALL[2:])
        made = make(files={name: Files.in_folder(home.folder, home.identity(name)) for name in names}, dials=())
        held = home.of("gpu/7")
        revoke(home.folder, home.authority, [held.serial], "a test")
        for number in range(30):
            knock = Knock(RUN, "gpu/7", f"npu/{number}" + "x" * 150, f"{number:016x}")  # another text each time
            with pytest.raises(IdentityError, match="was revoked"):
                call(made, held, knock)
        made.gateways["gpu"].stop("a test")
        refused = actions(made.sites["gpu"], "refuse")
        assert len(refused) < 15 and sum(each["times"] for each in refused) == 30
        assert all(len(each["object"]) <= 200 and len(each["reason"]) <= 200 for each in refused)

    def test_nothing_is_kept_of_names_that_a_gateway_invents(
        self, make: Callable[..., Town], files: dict[str, Files]
    ) -> None:
        """A cluster that does not list its workers may have any."""
        made = make(workers=(GPU,), dials=())
        gateway, theirs = made.gateways["gpu"], Credentials.load(files["npu/gateway"])
        for number in range(20):
            knock = Knock(RUN, f"npu/{number}", GPU, f"{number:016x}")
            with pytest.raises(TransportError, match="has not connected to its gateway yet"):
                call(made, theirs, knock, gateway=False)
            gateway._gone_there(knock.source, "it says")
        assert not gateway._list_pairs()
        assert not gateway._final_errors._gone

    def test_one_gateway_has_the_places_of_its_own_workers_and_no_others(
        self, make: Callable[..., Town], files: dict[str, Files], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever workers of this cluster it speaks of, where the cluster does not list them."""
        monkeypatch.setattr("whale_nebula.gateway.entry.most_streams", lambda pairs: 3)
        monkeypatch.setattr(Gateway, "_is_awaited", lambda gateway, here, there: True)  # as if all these had been here
        made = make(workers=(NPU,), dials=())
        theirs, lanes = Credentials.load(files["npu/gateway"]), [Lane() for _ in range(4)]
        for number, lane in enumerate(lanes):
            knock = Knock(RUN, NPU, f"gpu/{number}", f"{number:016x}")
            with contextlib.nullcontext() if number < 3 else pytest.raises(TransportError) as told:
                call(made, theirs, knock, lane, gateway=False)
        assert "3 streams here" in told.value.why
        assert len(made.gateways["gpu"]._pairs) == 3
        for lane in lanes:
            lane.end("a test")

    def test_the_lookout_outlives_a_look_that_fails(self, make: Callable[..., Town]) -> None:
        gateway = make(dials=()).gateways["gpu"]
        failed, went_on = threading.Semaphore(0), threading.Semaphore(0)

        def fail() -> None:
            failed.release()
            raise RuntimeError("can't start new thread")

        gateway._look_at_workers = fail  # type: ignore[method-assign]
        gateway._remove_pairs = went_on.release  # type: ignore[method-assign]
        for _ in range(3):
            assert failed.acquire(timeout=5.0)
            assert went_on.acquire(timeout=5.0)

    def test_a_frame_that_names_another_pair(self, make: Callable[..., Town], files: dict[str, Files]) -> None:
        made = make(workers=(GPU, NPU, OTHER))
        lane = call(made, Credentials.load(files[GPU]), Knock(RUN, GPU, NPU, "00112233aabbccdd"))
        header = Header(Kind.BEAT, Flag.LAST, conversation=1, source=0, destination=2)
        assert lane.send(pack(header, 0))
        until(lambda: actions(made.sites["gpu"], "end"))
        [end] = actions(made.sites["gpu"], "end")
        until(lambda: lane.over)
        assert end["decision"] == "deny"
        assert "a frame from worker 0 to worker 2" in end["reason"]

    @pytest.mark.parametrize("dials", CLUSTERS)
    def test_a_worker_ends_its_link_to_one_that_is_revoked_at_its_own_site_alone(
        self, tmp_path: Path, make: Callable[..., Town], dials: str
    ) -> None:
        """The other site's gateway and workers have the old list; nor does it matter which gateway has dialled."""
        home = Certificates(tmp_path / "home")
        home.issue(GPU, NPU, "gpu/gateway", "npu/gateway")
        shutil.copytree(home.folder, tmp_path / "npu")
        folders = {"gpu": home.folder, "npu": tmp_path / "npu"}
        made = make(
            files={name: Files.in_folder(folders[name[:3]], home.identity(name)) for name in ALL},
            dials=(dials,),
            met=True,
        )
        revoke(folders["npu"], home.authority, [home.of(GPU).serial], "a test")
        with pytest.raises(IdentityError, match="the certificate of gpu/0 was revoked"):
            made.link(NPU, GPU).receive(key(0), SOON)


class TestRevokedOnTheHostsOfOneSide:
    """The other side's hosts have an older deny list, so nothing that these do can be relied on."""

    def files(self, home: Certificates, *places: str) -> dict[str, Files]:
        """Files of everybody, where `places` have a copy of the deny list of their own: the one in `npu.json`."""
        home.issue(GPU, NPU, "gpu/gateway", "npu/gateway")
        found = {name: Files.in_folder(home.folder, home.identity(name)) for name in ALL}
        for name, each in found.items():
            own = home.folder / ("npu.json" if name in places else "gpu.json")
            if each.revoked is not None and each.revoked.exists():
                shutil.copy(each.revoked, own)
            found[name] = each._replace(revoked=own)
        return found

    def revoke(self, home: Certificates, who: str) -> None:
        revoke(home.folder, home.authority, [home.of(who).serial], "a test")
        shutil.copy(home.folder / "revoked.json", home.folder / "npu.json")

    @pytest.mark.parametrize("dials", [("gpu",), pytest.param(("npu",), marks=pytest.mark.grid)])
    def test_a_gateway_is_left_by_all_streams_whoever_dialled(
        self, tmp_path: Path, make: Callable[..., Town], dials: tuple[str, ...]
    ) -> None:
        home = Certificates(tmp_path / "home")
        made = make(files=self.files(home, NPU, "npu/gateway"), dials=dials, deadlines=IMPATIENT, met=True)
        npu, far = made.gateways["npu"], made.gateways["npu"]._pair(NPU, GPU).half(Side.FAR)
        until(lambda: npu._routes["gpu"].control.lanes)
        [trunk] = npu._routes["gpu"].control.lanes
        assert far is not None and trunk.guest is not None
        assert {guest.identity.worker for guest in [*far.guests, trunk.guest]} == {"gpu/gateway"}
        self.revoke(home, "gpu/gateway")
        until(lambda: far.connection.over and trunk.over)
        told = made.link(*((GPU, NPU) if dials == ("gpu",) else (NPU, GPU)))  # who is dialled waits for a better one
        with pytest.raises(IdentityError, match="certificate of gpu/gateway was revoked"):
            told.take("SESSION", SOON)
        assert not npu._routes["gpu"].control.up and npu._pair(NPU, GPU).half(Side.FAR) is None
        for worker in (GPU, NPU):  # they would wait for each other
            made.kill(worker)

    def test_a_gateway_that_is_renewed_late_is_waited_for(
        self, tmp_path: Path, make: Callable[..., Town], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its certificate has expired, so both its own workers and the other gateway leave it; once it is renewed they
        go on, though they were refused more than twice.
        """
        home, present, later = Certificates(tmp_path / "home"), security_files.now, [timedelta(0)]
        monkeypatch.setattr(security_files, "now", lambda: present() + later[0])
        home.issue(GPU, NPU, "gpu/gateway", days=7.0)
        home.issue("npu/gateway", days=1.0)
        made = make(files={name: Files.in_folder(home.folder, home.identity(name)) for name in ALL}, met=True)
        route, tried, call = made.gateways["gpu"]._routes["npu"], [0], Route._call

        def count(route: Route, *args: Any) -> int:
            tried[0] += 1
            return call(route, *args)

        monkeypatch.setattr(Route, "_call", count)
        later[0] = timedelta(days=2)
        until(lambda: tried[0] > 4 and "has expired" in route._trouble)
        until(lambda: made.link(NPU, GPU).state().refusal is not None)
        later[0] = timedelta(0)  # TLS goes by the true clock, and takes no certificate of tomorrow
        renew(home.folder, home.authority, [home.identity("npu/gateway")], days=7.0)
        later[0] = timedelta(days=2)
        made.cross(range(3))

    def test_a_gateway_is_left_by_its_own_workers(self, tmp_path: Path, make: Callable[..., Town]) -> None:
        home = Certificates(tmp_path / "home")
        made = make(files=self.files(home, NPU), deadlines=IMPATIENT, met=True)
        self.revoke(home, "npu/gateway")
        with pytest.raises(IdentityError, match="certificate of npu/gateway was revoked"):
            made.link(NPU, GPU).receive(key(0, GPU, NPU), SOON)


class TestItsEnd:
    def test_the_end_of_a_stream_that_is_just_opened_is_written_before_the_log_is_closed(
        self, make: Callable[..., Town], caplog: pytest.LogCaptureFixture
    ) -> None:
        made = make(dials=("gpu",))
        gateway = made.gateways["gpu"]
        route, pair = gateway._routes["npu"], gateway._pair(GPU, NPU)
        half = route.half(pair, Connection("00112233aabbccdd"), dialled=True)
        gateway.journal.note_opened(pair, half)  # as a thread does that dials, and has not handed it to the pair yet

        def give_up() -> None:
            gateway._stopping.wait(SOON)
            until(lambda: gateway.journal._ending)
            gateway.journal.note_ended(pair, half, "the gateway ends")

        dials = threading.Thread(target=give_up)
        dials.start()
        gateway.stop("a test")
        dials.join(SOON)
        with pytest.raises(TransportError, match="is stopping"):
            gateway.journal.note_opened(pair, half)
        said = [(each["action"], each.get("connection")) for each in records(made.sites["gpu"])]
        assert said.index(("end", "00112233aabbccdd")) < said.index(("end", None))
        assert not [each for each in caplog.messages if "the audit log is closed" in each]

    def test_every_stream_that_was_opened_has_its_end(self, make: Callable[..., Town]) -> None:
        made = make(met=True)
        for gateway in made.gateways.values():
            gateway.stop("a test")
        for site in made.sites.values():
            found = records(site)
            opened = [each["connection"] for each in found if each["action"] == "open"]
            assert opened and sorted(opened) == sorted(each["connection"] for each in found if "frames" in each)
        for worker in (GPU, NPU):
            made.kill(worker)


class TestAuditHeads:
    def test_one_signed_under_an_authority_that_came_later_is_kept(self, tmp_path: Path) -> None:
        old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
        old.issue("gpu/gateway")
        new.issue("npu/gateway")
        files = Files.in_folder(old.folder, old.identity("gpu/gateway"))
        gateway = Gateway(Site(RUN, "gpu", "127.0.0.1:0", {}, {"npu": None}, files=files, audit=tmp_path / "a.jsonl"))
        with files.ca.open("ab") as file:  # as ca.pem is copied to the host while the gateway runs
            file.write((new.folder / "ca.pem").read_bytes())
        head = Head.sign(new.of("npu/gateway"), 7, "ab" * 32)
        gateway._routes["npu"].control.receive(control.encode_control({"kind": "HEAD", "head": head._asdict()}))
        gateway.stop("a test")
        assert list(read_heads(gateway.site.heads)) == [head]


class TestHealth:
    def ask(self, made: Town, files: Files, service: str = "") -> Any:
        credentials = Credentials.load(files)
        name = made.gateways["gpu"].site.identity.dns
        options = [("grpc.ssl_target_name_override", name)]
        with grpc.secure_channel(made.sites["gpu"].listen, channel_credentials(credentials), options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SOON).status

    def test_whoever_has_a_certificate_may_ask(self, make: Callable[..., Town], files: dict[str, Files]) -> None:
        made = make()
        serving = health_pb2.HealthCheckResponse.SERVING
        assert [self.ask(made, files[who]) for who in (GPU, NPU, "gpu/operator-0")] == [serving] * 3
        until(lambda: self.ask(made, files[GPU], "npu") == serving)

    def test_one_who_asks_without_end_is_refused_and_others_are_not(
        self, make: Callable[..., Town], files: dict[str, Files]
    ) -> None:
        made = make(dials=())
        made.gateways["gpu"]._health._asked = Buckets(3, 0.0)
        assert self.ask(made, files["npu/7"]) == self.ask(made, files["npu/7"])
        with pytest.raises(grpc.RpcError, match="too many requests"):
            [self.ask(made, files["npu/7"]) for _ in range(2)]
        self.ask(made, files[GPU])

    def test_nobody_watches(self, make: Callable[..., Town], files: dict[str, Files]) -> None:
        """Such a stream would never end."""
        made = make()
        options = [("grpc.ssl_target_name_override", made.gateways["gpu"].site.identity.dns)]
        credentials = channel_credentials(Credentials.load(files["npu/7"]))
        with grpc.secure_channel(made.sites["gpu"].listen, credentials, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(60):
                assert stub.Watch(health_pb2.HealthCheckRequest()).code() == grpc.StatusCode.UNIMPLEMENTED

    def test_a_way_that_is_not_there_is_not_served(self, make: Callable[..., Town], files: dict[str, Files]) -> None:
        made = make(dials=())
        assert self.ask(made, files[GPU], "npu") == health_pb2.HealthCheckResponse.NOT_SERVING
