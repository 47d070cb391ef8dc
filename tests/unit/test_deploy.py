"""The sample manifests: they are what their platforms read, and a run finds its workers in what they set."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from whale_nebula.cli.gateway import parser as gateway_parser
from whale_nebula.cli.run import parser, words
from whale_nebula.config import Config, load
from whale_nebula.config.document import read
from whale_nebula.gateway.site import Site
from whale_nebula.launch.resolve import Asked, Resolved, resolve

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CLUSTERS = ("gpu", "npu")
WORKERS = {"jobset": {"gpu": 2, "npu": 1}, "slurm": {"gpu": 2, "npu": 2}, "skypilot": {"gpu": 2, "npu": 1}}


def found(config: Config, command: list[str], environ: Mapping[str, str]) -> Resolved:
    """Where a command of ours finds its workers; it must be one that `run` reads."""
    assert command[:2] == ["whale-nebula", "run"]
    options, script = words(command[2:])
    given = parser().read(options)
    assert script == ["train.py"]
    return resolve(config, environ, Asked(given.cluster))


def check(platform: str, cluster: str, config: Config, placements: list[Resolved], source: str) -> None:
    """All workers of a cluster are there, each once; all see the same; the other cluster is as large as it is."""
    own = [f"{cluster}/{number}" for number in range(WORKERS[platform][cluster])]
    assert [each.placement.here for each in placements] == [(worker,) for worker in own]
    assert {each.source for each in placements} == {source}
    assert len({json.dumps(each.placement.addresses) for each in placements}) == 1
    there = {name: len([w for w in placements[0].placement.addresses if w.startswith(f"{name}/")]) for name in CLUSTERS}
    assert there == WORKERS[platform]
    assert config.run == "translation" and all(each.gateway for each in config.clusters.values())


class TestJobSet:
    """The fields are those of jobset.x-k8s.io/v1alpha2, batch/v1 and v1, as far as the manifests use them."""

    FIELDS = (
        ("", {"apiVersion", "kind", "metadata", "spec"}),
        ("metadata", {"name"}),
        ("spec", {"network", "successPolicy", "failurePolicy", "replicatedJobs"}),
        ("spec.network", {"enableDNSHostnames", "subdomain"}),
        ("spec.successPolicy", {"operator", "targetReplicatedJobs"}),
        ("spec.failurePolicy", {"maxRestarts"}),
        ("spec.replicatedJobs", {"name", "replicas", "template"}),
        (
            "spec.replicatedJobs.template.spec",
            {"parallelism", "completions", "backoffLimit", "completionMode", "template"},
        ),
        (
            "spec.replicatedJobs.template.spec.template.spec",
            {"restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes"},
        ),
        (
            "spec.replicatedJobs.template.spec.template.spec.containers",
            {"name", "image", "command", "env", "ports", "resources", "volumeMounts"},
        ),
    )

    @staticmethod
    def documents(cluster: str) -> dict[str, Any]:
        found = list(yaml.safe_load_all((DEPLOY / "jobset" / f"{cluster}.yaml").read_text()))
        assert [(each["kind"], each["apiVersion"]) for each in found] == [
            ("ConfigMap", "v1"),
            ("Service", "v1"),
            ("PersistentVolumeClaim", "v1"),
            ("JobSet", "jobset.x-k8s.io/v1alpha2"),
        ]
        return {each["kind"]: each for each in found}

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_it_has_only_fields_that_there_are(self, cluster: str) -> None:
        for path, known in self.FIELDS:
            for each in at(self.documents(cluster)["JobSet"], path.split(".") if path else []):
                assert set(each) <= known, path

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_every_pod_finds_itself_and_the_others(self, cluster: str) -> None:
        made = self.documents(cluster)
        config = load(yaml.safe_load(made["ConfigMap"]["data"]["clusters.yaml"]))
        job = next(each for each in made["JobSet"]["spec"]["replicatedJobs"] if each["name"] == "worker")
        pod = job["template"]["spec"]["template"]["spec"]["containers"][0]
        environs = [environment(made["JobSet"], job, pod, index) for index in range(job["replicas"])]
        placements = [found(config, pod["command"], environ) for environ in environs]
        check("jobset", cluster, config, placements, "Kubernetes JobSet")
        subdomain = made["JobSet"]["spec"]["network"]["subdomain"]
        assert all(f".{subdomain}:" in placements[0].placement.addresses[each.placement.here[0]] for each in placements)

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_what_it_mounts_and_waits_for_is_there(self, cluster: str) -> None:
        made = self.documents(cluster)
        jobs = made["JobSet"]["spec"]["replicatedJobs"]
        assert set(made["JobSet"]["spec"]["successPolicy"]["targetReplicatedJobs"]) < {job["name"] for job in jobs}
        for pod in at(made["JobSet"], ["spec", "replicatedJobs", "template", "spec", "template", "spec"]):
            volumes = {each["name"]: each for each in pod["volumes"]}
            assert {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]} == set(volumes)
            assert volumes["config"]["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
            assert volumes["certs"]["secret"]["defaultMode"] == 0o400
            if "audit" in volumes:
                claimed = volumes["audit"]["persistentVolumeClaim"]["claimName"]
                assert claimed == made["PersistentVolumeClaim"]["metadata"]["name"]
        selected = made["Service"]["spec"]["selector"]
        assert selected["jobset.sigs.k8s.io/jobset-name"] == made["JobSet"]["metadata"]["name"]
        assert selected["jobset.sigs.k8s.io/replicatedjob-name"] in {job["name"] for job in jobs}


    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_the_gateway_can_write_its_audit_log_and_it_stays(self, cluster: str, tmp_path: Path) -> None:
        made = self.documents(cluster)
        job = next(each for each in made["JobSet"]["spec"]["replicatedJobs"] if each["name"] == "gateway")
        pod = job["template"]["spec"]["template"]["spec"]["containers"][0]
        (tmp_path / "clusters.yaml").write_text(made["ConfigMap"]["data"]["clusters.yaml"])
        site = gateway(pod["command"], tmp_path)
        mounts = {each["mountPath"]: each for each in pod["volumeMounts"]}
        holding = [path for path in mounts if str(site.audit).startswith(f"{path}/")]
        assert [mounts[path]["name"] for path in holding] == ["audit"]
        assert "readOnly" not in mounts[holding[0]]


def gateway(command: list[str], folder: Path) -> Site:
    """What a gateway's command comes to, with the configs in a folder."""
    assert command[:2] == ["whale-nebula", "gateway"]
    given = gateway_parser().read(command[2:])
    path = folder / Path(given.config).name
    site = Site.of(load(path), given.cluster, path, given.listen)
    return site if given.audit is None else replace(site, audit=Path(given.audit))


@pytest.mark.parametrize("platform", ["slurm", "skypilot"])
def test_where_no_manifest_starts_the_gateways_the_page_says_how(platform: str) -> None:
    told = re.findall(r"whale-nebula gateway [^\n]*?--cluster \w+", (DEPLOY / platform / "README.md").read_text())
    sites = [gateway(line.split(), DEPLOY / platform) for line in told]
    assert [site.cluster for site in sites] == list(CLUSTERS)
    assert all(other is not None for site in sites for other in site.gateways.values())
    assert "not built" not in (DEPLOY / "README.md").read_text()


def at(value: Any, path: list[str]) -> list[Any]:
    """All that stands under a path; a list on the way is gone through."""
    if isinstance(value, list):
        return [each for item in value for each in at(item, path)]
    return at(value[path[0]], path[1:]) if path else [value]


def environment(jobset: Any, job: Any, container: Any, index: int) -> dict[str, str]:
    """What Kubernetes and its JobSet controller set in a pod."""
    labels = {
        "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
        "jobset.sigs.k8s.io/replicatedjob-replicas": str(job["replicas"]),
        "jobset.sigs.k8s.io/job-index": str(index),
    }
    environ = {"JOB_COMPLETION_INDEX": "0"} if job["template"]["spec"]["completionMode"] == "Indexed" else {}
    for each in container["env"]:
        path = each["valueFrom"]["fieldRef"]["fieldPath"]
        label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
        assert label is not None, path
        environ[each["name"]] = labels[label[1]]
    return environ


class TestSlurm:
    OPTIONS = frozenset(
        {"job-name", "nodes", "ntasks-per-node", "gpus-per-task", "gres", "time", "signal", "output"}
    )

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_every_task_finds_itself_and_the_others(self, cluster: str, tmp_path: Path) -> None:
        script = DEPLOY / "slurm" / f"{cluster}.sbatch"
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.MULTILINE))
        assert set(asked) <= self.OPTIONS
        assert script.read_text().count("#SBATCH") == len(asked)
        command = told(["bash", str(script)], {"SLURM_SUBMIT_DIR": str(DEPLOY / "slurm")}, tmp_path)["command"]
        config = load(DEPLOY / "slurm" / command[command.index("--config") + 1])
        nodes, each = int(asked["nodes"]), int(asked["ntasks-per-node"])
        step = {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": f"node[01-{nodes:02d}]",
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        }
        placements = [found(config, command, {**step, "SLURM_PROCID": str(task)}) for task in range(nodes * each)]
        check("slurm", cluster, config, placements, "Slurm")


class TestSkyPilot:
    FIELDS = frozenset({"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run"})

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_every_node_finds_itself_and_the_others(self, cluster: str, tmp_path: Path) -> None:
        task = read(DEPLOY / "skypilot" / f"{cluster}.yaml").value
        assert set(task) == self.FIELDS
        config = load(DEPLOY / "skypilot" / task["file_mounts"]["~/nebula/clusters.yaml"])
        assert subprocess.run(["bash", "-n"], input=task["setup"].encode(), check=False).returncode == 0
        placements = []
        for rank in range(task["num_nodes"]):
            hosts = "\n".join(f"10.1.0.{number + 1}" for number in range(task["num_nodes"]))
            sky = {"SKYPILOT_NODE_IPS": hosts, "SKYPILOT_NODE_RANK": str(rank)}
            seen = told(["bash", "-c", task["run"]], sky, tmp_path)
            placements.append(found(config, seen["command"], {"TF_CONFIG": seen["tf_config"]}))
        check("skypilot", cluster, config, placements, "TF_CONFIG")


def told(command: list[str], environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Run a script with a `whale-nebula` that only writes down how it was called, and an `srun` that runs one task."""
    (folder / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (folder / "whale-nebula").write_text('#!/bin/sh\nprintf "%s\\n" "$TF_CONFIG" whale-nebula "$@"\n')
    for each in ("srun", "whale-nebula"):
        (folder / each).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(command, env={**environ, "PATH": path}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    return {"tf_config": first, "command": rest}


def test_each_pair_has_its_page() -> None:
    for folder in WORKERS:
        assert (DEPLOY / folder / "README.md").is_file()
        assert f"({folder})" in (DEPLOY / "README.md").read_text()
