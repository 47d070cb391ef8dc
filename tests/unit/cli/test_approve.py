"""`whale-nebula approve`: signed programs run, others do not."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import py_compile
import re
import shutil
import struct
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import zygote
from whale_nebula.accounts.registry import Registry
from whale_nebula.cli.approve import main
from whale_nebula.config import load
from whale_nebula.errors import NebulaError
from whale_nebula.security import approval, authority, code, files, trust
from whale_nebula.security.authority import Authority

SCRIPT = """
import os
import keras, numpy as np
import tool
import whale_nebula as nb
from helper import WIDTH

if "also.py" in os.listdir("."):
    import also
nb.init("clusters.yaml")
print("begun")
inputs = keras.Input((4,))
with nb.cluster(), nb.pipeline(int(os.environ.get("MICRO_BATCHES", "1"))):
    with nb.stage(cluster="gpu"):
        hidden = keras.layers.Dense(WIDTH)(inputs)
    with nb.stage(cluster="npu"):
        outputs = keras.layers.Dense(1)(hidden)
model = keras.Model(inputs, outputs, name=os.environ.get("NAME", "net"))
model.compile("sgd", "mse")
model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
print("trained")
"""
CONFIG = "run: mt\nclusters: {gpu: {}, npu: {}}\napprovals: approved\n"


def install(folder: Path, version: str, text: str = "VALUE = 1\n") -> None:
    """Install a package with its metadata."""
    info = folder / "packages" / "tool-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / "packages" / "tool.py").write_text(text)
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"tool.py,sha256={digest},{len(text)}\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tool\nVersion: {version}\n")


def run_command(folder: Path, *words: str, **env: str) -> tuple[int, str, str]:
    environment = {"PYTHONPATH": str(folder / "packages"), **env}
    code = f"import sys; sys.path.append({str(folder / 'packages')!r}); "
    if words[0] in ("approve", "run"):
        code += "from whale_nebula.cli.main import main; sys.exit(main(sys.argv[1:]))"
    else:
        code += "import runpy; sys.path[0] = '.'; runpy.run_path(sys.argv[1], run_name='__main__')"
    result = zygote.run("-c", code, *words, cwd=folder, env=environment)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a script, an authority, and an approval."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("WIDTH = 3\n")
    (folder / "clusters.yaml").write_text(CONFIG)
    install(folder, "1.0")
    authority.create(folder / "certs", Authority.create("mt", {}))
    status, out, err = run_command(folder, "approve", "train.py", "--config", "clusters.yaml", "--yes", "--why", "seen")
    assert status == 0, err
    for text in ("plan of net.train_step", "b0  gpu   npu  derived", "helper", "tool 1.0", "signed: approved/train-"):
        assert text in re.sub(r"(?<=b0) +", "  ", out), out
    yield folder


@pytest.fixture
def site(signed: Path, tmp_path: Path) -> Path:
    """A copy of the signed folder, as on a worker's host."""
    return Path(shutil.copytree(signed, tmp_path / "site"))


def test_approved_script_runs_despite_unreadable_other_approvals(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "approved" / "another" / "approval.json").mkdir(parents=True)
    (site / "approved" / "gone").mkdir()
    (site / "approved" / "gone" / "approval.json").symlink_to("nowhere")
    assert main(["--list", "--config", str(site / "clusters.yaml")]) == 0
    assert "another   it cannot be read: Is a directory" in capsys.readouterr().out
    status, out, err = run_command(site, "train.py")
    assert status == 0 and out.split() == ["begun", "trained"], err


def find_approval(site: Path) -> Path:
    return next((site / "approved").glob("*/approval.json"))


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(site: Path) -> None:
        path = find_approval(site) if name == "approval" else site / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return change


def sign_by_other_authority(site: Path) -> None:
    """Replace the signature by that of another authority of the same name."""
    document = json.loads(find_approval(site).read_text())
    del document["signature"]
    key = Authority.create("mt", {}).key
    signature = key.sign(b"whale_nebula approval 1\0" + approval.encode_canonical(document), files.SIGNATURE)
    find_approval(site).write_text(json.dumps({**document, "signature": base64.b64encode(signature).decode()}))


def replace_by_expired_approval(site: Path) -> None:
    approved = approval.read_all(site / "approved", *load_trust(site), None, files.now())[0].approval
    assert approved is not None
    plans = {"net.train_step": find_plan(site).read_bytes()}
    shutil.rmtree(site / "approved")
    signer, past = authority.load(site / "certs"), files.now() - timedelta(days=2)
    approval.save(site / "approved", signer, "train.py", (approved.files, approved.packages), plans, days=1, at=past)


def load_trust(site: Path) -> list[approval.Trust]:
    return [approval.Trust(authority.load_certificates(site / "certs"))]


def withdraw(site: Path) -> None:
    serial = json.loads(find_approval(site).read_text())["serial"]
    options = ["--withdraw", serial[:8], "--config", str(site / "clusters.yaml"), "--why", "a mistake"]
    assert main(options) == 0


def test_withdrawal_without_a_serial_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As from an empty variable of a shell: the only approval must not be withdrawn."""
    assert main(["--withdraw", "", "--config", str(site / "clusters.yaml")]) == 65
    assert "no approval of this authority has a serial that begins with ''" in capsys.readouterr().err


def restore_old_deny_list(site: Path) -> None:
    old_list = (site / "certs" / "revoked.json").read_bytes()
    withdraw(site)
    withdraw(site)  # number 3: this host has seen a higher number than that of the old list
    (site / "certs" / "revoked.json").write_bytes(old_list)


def change_run_name(site: Path) -> None:
    (site / "clusters.yaml").write_text(CONFIG.replace("run: mt", "run: other"))


def find_plan(site: Path) -> Path:
    return next((site / "approved").glob("*/*.plan.json"))


def swap_plan(site: Path) -> None:
    """Replace the approved plan by another one."""
    path = find_plan(site)
    path.write_text(path.read_text().replace('"micro_batch": 1', '"micro_batch": 2'))


def add_module(site: Path) -> None:
    (site / "also.py").write_text("")


def change_installed(site: Path) -> None:
    (site / "packages" / "tool.py").write_text("VALUE = 2\n")


def install_and_load(site: Path) -> None:
    """Install and import a package that was not installed at approval."""
    shutil.move(site / "packages" / "tool.py", site / "packages" / "other.py")
    info = site / "packages" / "tool-1.dist-info"
    shutil.copytree(info, site / "packages" / "other-1.dist-info")
    new = site / "packages" / "other-1.dist-info"
    for name in ("RECORD", "METADATA"):
        (new / name).write_text((new / name).read_text().replace("tool", "other"))
    edit("train.py", "import tool", "import other")(site)


class Attack(NamedTuple):
    """A change on a worker's host, the expected error, and whether the script starts before it."""

    act: Callable[[Path], object]
    said: str
    begun: bool = False
    env: Mapping[str, str] = {}


NOTHING = Attack(lambda site: None, "")
ATTACKS = {
    "another script": Attack(edit("train.py", "sgd", "adam"), "the script is .* here, but .* was approved"),
    "another module": Attack(edit("helper.py", "3", "5"), "helper is .* here, but .* was approved"),
    "an additional module": Attack(add_module, r"also \(.*\) was not approved"),
    "another version": Attack(lambda site: install(site, "1.1"), "tool is 1.1 .* here, but 1.0 .* was approved"),
    "another build": Attack(lambda site: install(site, "1.0", "VALUE = 2\n"), "tool is 1.0 .* here, but 1.0"),
    "a changed package": Attack(change_installed, r"tool \(.*\) was not approved"),
    "an additional package": Attack(install_and_load, "the script is"),
    "another plan": NOTHING._replace(
        said="micro_batch is 2 here, 1 in the approved plan", begun=True, env={"MICRO_BATCHES": "2"}
    ),
    "another step": NOTHING._replace(said="approved steps:", begun=True, env={"NAME": "other"}),
    "a swapped plan": Attack(swap_plan, "its digest differs", begun=True),
}
SAMPLE = ("an additional module", "another build", "a changed package", "another plan", "another step")
"""The attacks that run by default; others are covered by `EVASIONS`, and by the approvals and plans below."""


@pytest.mark.parametrize(
    "attack",
    [pytest.param(each, marks=() if name in SAMPLE else pytest.mark.grid) for name, each in ATTACKS.items()],
    ids=ATTACKS,
)
def test_attack_on_approved_program_is_refused(attack: Attack, site: Path) -> None:
    attack.act(site)
    status, out, err = run_command(site, "train.py", **attack.env)
    assert status == 1 and out.split() == ["begun"] * attack.begun, (out, err)
    assert re.search(attack.said, err), err


APPROVALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a modified approval": (edit("approval", '"why": "seen"', '"why": ""'), "not signed by the run"),
    "an extended approval": (edit("approval", '"until": "2', '"until": "3'), "not signed by the run"),
    "an approval of another authority": (sign_by_other_authority, "not signed by the run's authority"),
    "a truncated approval": (lambda site: os.truncate(find_approval(site), 99), "it cannot be parsed"),
    "an expired approval": (replace_by_expired_approval, "it expired at"),
    "a withdrawn approval": (withdraw, "it was withdrawn .*: a mistake"),
    "an older deny list": (restore_old_deny_list, "the deny list is outdated"),
    "no approval": (lambda site: shutil.rmtree(site / "approved"), "the folder has no approvals"),
    "an approval of another run": (change_run_name, "it is for run 'mt'"),
    "no authority": (lambda site: (site / "certs" / "ca.pem").unlink(), "cannot read the authority's certificate"),
}
"""Changes that make all approvals invalid, and the expected error."""


@pytest.mark.parametrize(("act", "message"), APPROVALS.values(), ids=APPROVALS)
def test_invalid_approval_is_not_accepted(
    act: Callable[[Path], object], message: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act(site)
    monkeypatch.chdir(site)
    with pytest.raises(NebulaError, match=message):
        approval.check_script(load("clusters.yaml"), "clusters.yaml", "gpu", "train.py")


PLANS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a swapped plan": (swap_plan, "its digest differs"),
    "a missing plan": (lambda site: find_plan(site).unlink(), "cannot read an approved plan"),
}


@pytest.mark.parametrize(("act", "message"), PLANS.values(), ids=PLANS)
def test_changed_or_missing_approved_plan_is_refused(act: Callable[[Path], object], message: str, site: Path) -> None:
    (found,) = approval.read_all(site / "approved", *load_trust(site), None, files.now())
    assert approval.read_plan(found, "net.train_step") == find_plan(site).read_bytes()
    act(site)
    with pytest.raises(NebulaError, match=message):
        approval.read_plan(found, "net.train_step")


def link_script(site: Path) -> None:
    """Replace the script by a link to an approved one, next to a module that is not approved."""
    approved = site / "elsewhere"
    approved.mkdir()
    for name in ("train.py", "helper.py"):
        shutil.copy(site / name, approved)
    (site / "train.py").unlink()
    (site / "train.py").symlink_to(approved / "train.py")
    (site / "helper.py").write_text(EVIL)


def compile_other_module(site: Path) -> None:
    """Write bytecode of another module into the cache, with the time and the size of the approved source."""
    helper = site / "helper.py"
    found, cache = helper.stat(), Path(importlib.util.cache_from_source(str(helper)))
    (site / "other.py").write_text(EVIL)
    py_compile.compile(str(site / "other.py"), str(cache), dfile=str(helper))
    (site / "other.py").unlink()
    data = cache.read_bytes()
    cache.write_bytes(data[:8] + struct.pack("<II", int(found.st_mtime), found.st_size) + data[16:])


def add_package(site: Path) -> None:
    (site / "helper").mkdir()
    (site / "helper" / "__init__.py").write_text(EVIL)


EVIL = "WIDTH = 3; import os; print('begun', flush=True); os._exit(0)"
REPLACEMENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to the script": (link_script, "helper is .* here, but .* was approved"),
    "a module that hides a package": (
        lambda site: (site / "tool.py").write_text(EVIL),
        "tool next to the script hides",
    ),
    "a module that hides a standard one": (
        lambda site: (site / "json.py").write_text(EVIL),
        "json next to the script hides an installed or standard module",
    ),
    "a package before the module": (add_package, "helper is .* here, but .* was approved"),
    "an extension before the module": (
        lambda site: (site / f"helper{EXTENSION_SUFFIXES[0]}").write_bytes(b"x"),
        "helper is .* here, but .* was approved",
    ),
}
"""Files that Python would load in place of approved or installed ones, and the expected difference."""


@pytest.mark.parametrize(("act", "message"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_file_loaded_in_place_of_an_approved_one_is_refused(
    act: Callable[[Path], object], message: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site)
    monkeypatch.syspath_prepend(str(site / "packages"))
    monkeypatch.setattr(code, "list_packages", dict)
    approval.check_script(load("clusters.yaml"), "clusters.yaml", "gpu", "train.py")
    act(site)
    with pytest.raises(NebulaError, match=r"train\.py is not approved") as caught:
        approval.check_script(load("clusters.yaml"), "clusters.yaml", "gpu", "train.py")
    assert re.search(message, str(caught.value))


EVASIONS = {
    "another config": edit("train.py", 'nb.init("clusters.yaml")', "nb.init({})"),
    "without the library": lambda site: (site / "train.py").write_text("print('begun')"),
    "another module": edit("helper.py", "WIDTH = 3", "WIDTH = 3; import os; print('begun'); os._exit(0)"),
    "another version": lambda site: install(site, "1.1"),
    "no approval": lambda site: shutil.rmtree(site / "approved"),
}


@pytest.mark.parametrize(
    "evade",
    [pytest.param(each, marks=pytest.mark.grid if name == "no approval" else ()) for name, each in EVASIONS.items()],
    ids=EVASIONS,
)
def test_launcher_refuses_script_that_evades_the_check(evade: Callable[[Path], object], site: Path) -> None:
    evade(site)
    status, out, err = run_command(site, "run", "--all", "--config", "clusters.yaml", "train.py")
    assert status == 78 and not out and re.search("NB-[0-9]+ train.py is not approved", err), (out, err)


def test_bytecode_of_another_module_is_not_loaded(site: Path) -> None:
    """Its time and size are those of the approved source."""
    compile_other_module(site)
    code = "import sys; sys.path.insert(0, '.'); {}; import helper; print('loaded', helper.WIDTH)"
    before = zygote.run("-c", code.format("pass"), cwd=site)
    assert before.stdout.split() == ["begun"]
    guard = "from whale_nebula.security.code import import_from_source; import_from_source('train.py')"
    after = zygote.run("-c", code.format(guard), cwd=site)
    assert after.stdout.split() == ["loaded", "3"], after.stderr


def test_launcher_accepts_approved_script(site: Path) -> None:
    code = f"import sys; sys.path.append({str(site / 'packages')!r}); "
    code += "from whale_nebula.config import load; from whale_nebula.security.approval import check_script; "
    code += "check_script(load('clusters.yaml'), 'clusters.yaml', 'gpu', 'train.py'); print('starts')"
    result = zygote.run("-c", code, cwd=site, env={"PYTHONPATH": str(site / "packages")})
    assert result.stdout.strip() == "starts", result.stderr


FORGED_FIELDS: Mapping[str, Mapping[str, object]] = {
    "an invalid serial": {"serial": "zz", "until": "2999-01-01T00:00:00Z"},
    "an invalid time": {"since": 5, "until": "2999-01-01T00:00:00Z"},
    "invalid files": {"files": [1]},
    "an invalid name": {"script": None},
}


@pytest.mark.parametrize("is_trusted", [False, True], ids=["forged", "by another owner"])
@pytest.mark.parametrize("changes", FORGED_FIELDS.values(), ids=FORGED_FIELDS)
def test_forged_approvals_are_listed_and_do_not_break_withdrawal(
    changes: Mapping[str, object], is_trusted: bool, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are neither added to the deny list nor raise an internal error."""
    document = {**json.loads(find_approval(site).read_text()), **changes}
    del document["signature"]
    other = Authority.create("mt", {}, bound=["npu"])
    key = other.key
    if is_trusted:
        with (site / "certs" / "ca.pem").open("ab") as file:
            file.write(authority.encode_certificate(other.certificate))
        trust.save(site / "certs" / "revoked-npu.json", "mt", key, 1, {})
    signature = key.sign(b"whale_nebula approval 1\0" + approval.encode_canonical(document), files.SIGNATURE)
    forged_folder = site / "approved" / "another"
    forged_folder.mkdir()
    document["signature"] = base64.b64encode(signature).decode()
    (forged_folder / "approval.json").write_text(json.dumps(document))
    options = ["--config", str(site / "clusters.yaml")]
    assert main(["--list", *options]) == 0
    assert "another   it " in capsys.readouterr().out
    assert main(["--withdraw", str(document["serial"])[:8], *options]) in (0, 65)
    assert load_deny_list(site).number in (1, 2)


def load_deny_list(site: Path) -> trust.SignedList:
    return trust.load(site / "certs" / "revoked.json", authority.load_certificates(site / "certs"))


def test_package_removed_after_import_is_listed_as_unreadable(site: Path) -> None:
    edit("helper.py", "WIDTH = 3", "WIDTH = 3; import os, tool; os.remove(tool.__file__)")(site)
    code = "import helper; from whale_nebula.security import code; print(code.list_files()['tool'])"
    code = f"import sys; sys.path[:0] = {[str(site), str(site / 'packages')]}; {code}"
    result = zygote.run("-c", code, cwd=site)
    assert result.stdout.strip() == "unreadable", result.stderr


def test_interactive_session_is_refused(site: Path) -> None:
    environment = {"PYTHONPATH": str(site / "packages")}
    code = "import sys; del sys.modules['__main__'].__file__; import whale_nebula as nb; nb.init('clusters.yaml')"
    result = zygote.run("-c", code, cwd=site, env=environment)
    assert "this process does not run a script in a file" in result.stderr


def test_signing_needs_confirmation_and_an_unchanged_program(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record can be created without the key, and signed elsewhere if the program is unchanged."""
    before, options = sorted((site / "approved").iterdir()), ["train.py", "--config", "clusters.yaml"]
    shutil.move(site / "certs" / "ca.key", site / "key")
    dry = run_command(site, "approve", *options, "--dry", "--json", "--record", "found.json")
    assert dry[0] == 0 and json.loads(dry[1])["signed"] is False, dry
    shutil.move(site / "key", site / "certs" / "ca.key")
    monkeypatch.chdir(site)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main([*options, "--record", "found.json"]) == 1
    assert "there is no terminal to ask for confirmation: --yes signs" in capsys.readouterr().err
    edit("helper.py", "3", "5")(site)
    assert main([*options, "--record", "found.json", "--yes"]) == 1
    assert "train.py differs from the examined program: nothing is signed (helper)" in capsys.readouterr().err
    assert sorted((site / "approved").iterdir()) == before
    assert main(["--list", "--config", str(site / "clusters.yaml")]) == 0
    assert "seen" in capsys.readouterr().out
    edit("helper.py", "5", "3")(site)
    registry = Registry(site / "certs", authority.load(site / "certs"))
    assert main([*options, "--record", "found.json", "--yes"]) == 0
    assert len(list((site / "approved").iterdir())) == len(before) + 1
    withdraw(site)
    signed, withdrawn = [each for each in registry.list_events() if "changed" in each]
    registry.close()
    assert (signed["action"], withdrawn["action"], withdrawn["reason"]) == ("approve", "withdraw approval", "a mistake")
    assert re.search(r"train.py \w{64}, plan \w{64}, approval \w{40} until ", ", ".join(signed["changed"]))


def test_examined_script_runs_isolated_and_forged_record_is_refused(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script has no terminal, its child processes end with it, and its record is compared with the files."""
    forged = {"format": "whale_nebula program 1", "files": {"__main__": "ab" * 32}, "packages": {}, "plans": []}
    (site / "train.py").write_text(
        f"import json, os, subprocess, sys\n"
        f"open('started', 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
        f"assert os.getpgrp() == os.getsid(0) == os.getpid() and not sys.stdin.read()\n"
        f"path = next(word[9:] for word in open('/proc/self/cmdline').read().split(chr(0)) if '--record=' in word)\n"
        f"open(path, 'w').write({json.dumps(forged)!r})\n"
        f"os._exit(0)\n"
    )
    monkeypatch.chdir(site)
    assert main(["train.py", "--config", "clusters.yaml", "--yes"]) == 1
    assert "differs from the examined program: nothing is signed (the script)" in capsys.readouterr().err
    state, by = Path("/proc", (site / "started").read_text(), "stat"), time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] not in "ZX":
        assert time.monotonic() < by
    assert len(list((site / "approved").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a script to approve, --list, or --withdraw"),
        (["--list", "--withdraw", "1f"], "exactly one is required"),
        (["train.py", "--days", "many"], "--days needs a number"),
        (["train.py", "--steps", "0"], "--steps needs a number"),
        (["train.py", "--folder", "nowhere"], "there is no authority in this folder"),
        (["train.py", "--days", "0"], "is not a valid certificate lifetime"),
        (["missing.py"], "file 'missing.py' does not exist"),
        (["train.py", "--record", "missing.json"], "the record missing.json cannot be read"),
        (["train.py", "--record", "train.py"], "train.py is not the record of a program"),
        (["--withdraw", "zz"], "no approval of this authority has a serial that begins with 'zz'"),
        (["train.py", "--config", "clusters.yml"], "the config cannot be read"),
    ],
)
def test_invalid_approve_command_is_reported(
    words: list[str], message: str, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(site)
    options = words if "--config" in words else [*words, "--config", "clusters.yaml"]
    try:
        assert main(options) not in (0, None)
    except SystemExit as end:
        assert end.code == 2
    assert message in capsys.readouterr().err


def test_autograph_modules_are_not_listed_as_script_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoGraph generates these modules from functions, with new names each time."""
    for name in ("__autograph_generated_file1a2b", "helper_of_mine"):
        path = tmp_path / f"{name}.py"
        path.write_text("x = 1\n")
        module = types.ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
    found = code.list_files(tmp_path / "train.py")
    assert "helper_of_mine" in found and not any(name.startswith("__autograph") for name in found)
