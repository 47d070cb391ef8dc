"""The sample manifests: valid for their platforms, and sufficient for a run to find its workers."""

from __future__ import annotations

import configparser
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

from whale_nebula.cli.gateway import make_parser as make_gateway_parser
from whale_nebula.cli.run import make_parser, split_arguments
from whale_nebula.config import Config, load
from whale_nebula.config.load import read_yaml
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.launch.placement import PlacementRequest
from whale_nebula.launch.resolve import Resolved, resolve

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CLUSTERS = ("gpu", "npu")
WORKERS = {"jobset": {"gpu": 2, "npu": 1}, "slurm": {"gpu": 2, "npu": 2}, "skypilot": {"gpu": 2, "npu": 1}}


def resolve_command(config: Config, command: list[str], environ: Mapping[str, str]) -> Resolved:
    """Where a command of ours finds its workers; it must be one that `run` reads."""
    assert command[:2] == ["whale-nebula", "run"]
    options, script = split_arguments(command[2:])
    given = make_parser().read(options)
    assert script == ["train.py"]
    return resolve(config, environ, PlacementRequest(given.cluster))


def check_placements(platform: str, cluster: str, config: Config, placements: list[Resolved], source: str) -> None:
    """All workers of a cluster are there, each once; all see the same; the other cluster is as large as it is."""
    own = [f"{cluster}/{number}" for number in range(WORKERS[platform][cluster])]
    assert [each.placement.here for each in placements] == [(worker,) for worker in own]
    assert {each.source for each in placements} == {source}
    assert len({json.dumps(each.placement.addresses) for each in placements}) == 1
    there = {name: len([w for w in placements[0].placement.addresses if w.startswith(f"{name}/")]) for name in CLUSTERS}
    assert there == WORKERS[platform]
    assert config.run == "translation" and all(each.gateway for each in config.clusters.values())


@pytest.mark.parametrize("cluster", CLUSTERS)
class TestJobSet:
    """The fields are those of jobset.x-k8s.io/v1alpha2; everything else is checked by Kubernetes' own schemas."""

    FIELDS = (
        ("", {"apiVersion", "kind", "metadata", "spec"}),
        ("metadata", {"name"}),
        ("spec", {"network", "successPolicy", "failurePolicy", "replicatedJobs"}),
        ("spec.network", {"enableDNSHostnames", "subdomain"}),
        ("spec.successPolicy", {"operator", "targetReplicatedJobs"}),
        ("spec.failurePolicy", {"maxRestarts"}),
        ("spec.replicatedJobs", {"name", "replicas", "template"}),
    )

    @staticmethod
    def load_documents(cluster: str) -> dict[str, Any]:
        documents = list(yaml.safe_load_all((DEPLOY / "jobset" / f"{cluster}.yaml").read_text()))
        kinds = ["ConfigMap", "Service", "PersistentVolumeClaim", "Deployment", *2 * ["NetworkPolicy"], "JobSet"]
        assert [each["kind"] for each in documents] == kinds
        policies = [each for each in documents if each["kind"] == "NetworkPolicy"]
        return {each["kind"]: each for each in documents} | {"NetworkPolicy": policies}

    @staticmethod
    def list_pod_templates(made: dict[str, Any]) -> dict[str, Any]:
        """The pod template of each role."""
        (worker,) = made["JobSet"]["spec"]["replicatedJobs"]
        return {"worker": worker["template"]["spec"]["template"], "gateway": made["Deployment"]["spec"]["template"]}

    def test_jobset_has_only_known_fields(self, cluster: str) -> None:
        for path, known in self.FIELDS:
            for each in find_values(self.load_documents(cluster)["JobSet"], path.split(".") if path else []):
                assert set(each) <= known, path

    def test_manifests_are_valid_by_kubernetes_schemas(self, cluster: str) -> None:
        kubernetes = pytest.importorskip("kubernetes_validate", reason="`make soak` installs it: 111 MB of schemas")
        made = self.load_documents(cluster)
        (worker,) = made.pop("JobSet")["spec"]["replicatedJobs"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "w"}, "spec": worker["template"]["spec"]}
        for document in (*made.pop("NetworkPolicy"), *made.values(), job):
            kubernetes.validate(document, "1.34", strict=True)
        job["spec"]["parallelizm"] = 1
        with pytest.raises(Exception, match="parallelizm"):
            kubernetes.validate(job, "1.34", strict=True)

    def test_pods_resolve_all_workers(self, cluster: str) -> None:
        made = self.load_documents(cluster)
        config = load(yaml.safe_load(made["ConfigMap"]["data"]["clusters.yaml"]))
        (job,) = made["JobSet"]["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]["containers"][0]
        environs = [create_pod_environment(made["JobSet"], job, pod, index) for index in range(job["replicas"])]
        placements = [resolve_command(config, pod["command"], environ) for environ in environs]
        check_placements("jobset", cluster, config, placements, "Kubernetes JobSet")
        subdomain = made["JobSet"]["spec"]["network"]["subdomain"]
        assert all(f".{subdomain}:" in placements[0].placement.addresses[each.placement.here[0]] for each in placements)

    def test_roles_can_read_only_their_own_keys(self, cluster: str, tmp_path: Path) -> None:
        """The secrets are filled by the commands of the page, from a folder in which all certificates were issued."""
        secrets = create_secrets(tmp_path)
        made, own = self.load_documents(cluster), set()
        for role, pod in self.list_pod_templates(made).items():
            mounted = {each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each}
            assert mounted == {f"nebula-{cluster}-{role}-certs"}
            readable = {name for secret in mounted for name in secrets[secret]}
            count = WORKERS["jobset"][cluster] if role == "worker" else 1
            keys = {name for name in readable if name.endswith(".key")}
            assert keys == {f"{cluster}-{role}-{index}.key" for index in range(count)}
            assert {"ca.pem", "revoked.json"} <= readable
            assert own.isdisjoint(mounted)
            own |= mounted

    def test_pods_run_unprivileged_and_can_read_their_keys(self, cluster: str) -> None:
        for pod in self.list_pod_templates(self.load_documents(cluster)).values():
            spec = pod["spec"]
            assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsUser"] != 0
            modes = [each["secret"]["defaultMode"] for each in spec["volumes"] if "secret" in each]
            assert modes == [0o440] and spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
            for container in spec["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}

    def test_mounted_volumes_are_defined(self, cluster: str) -> None:
        made = self.load_documents(cluster)
        for pod in self.list_pod_templates(made).values():
            volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
            mounts = [mount["name"] for each in pod["spec"]["containers"] for mount in each["volumeMounts"]]
            assert set(mounts) == set(volumes)
            assert volumes["config"]["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
        assert made["JobSet"]["spec"]["successPolicy"]["targetReplicatedJobs"] == ["worker"]

    def test_drained_gateway_keeps_its_audit_log(self, cluster: str, tmp_path: Path) -> None:
        made = self.load_documents(cluster)
        spec = made["Deployment"]["spec"]
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})  # one writer of the log
        pod = spec["template"]["spec"]["containers"][0]
        (tmp_path / "clusters.yaml").write_text(made["ConfigMap"]["data"]["clusters.yaml"])
        site = read_gateway_command(pod["command"], tmp_path)
        mounts = {each["mountPath"]: each for each in pod["volumeMounts"]}
        holding = [path for path in mounts if str(site.audit).startswith(f"{path}/")]
        assert [mounts[path]["name"] for path in holding] == ["audit"]
        assert "readOnly" not in mounts[holding[0]]
        volumes = {each["name"]: each for each in spec["template"]["spec"]["volumes"]}
        claimed = volumes["audit"]["persistentVolumeClaim"]["claimName"]
        assert claimed == made["PersistentVolumeClaim"]["metadata"]["name"]
        config = load(tmp_path / "clusters.yaml")
        (worker,) = made["JobSet"]["spec"]["replicatedJobs"]
        leaving = worker["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert leaving > config.patience >= config.gateway_grace > 30

    def test_network_policy_exposes_only_the_gateway(self, cluster: str, tmp_path: Path) -> None:
        made = self.load_documents(cluster)
        (port,) = made["Service"]["spec"]["ports"]
        labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert made["Service"]["spec"]["selector"] == made["Deployment"]["spec"]["selector"]["matchLabels"] == labels
        pod = made["Deployment"]["spec"]["template"]["spec"]["containers"][0]
        (tmp_path / "clusters.yaml").write_text(made["ConfigMap"]["data"]["clusters.yaml"])
        assert read_gateway_command(pod["command"], tmp_path).listen == f"0.0.0.0:{port['targetPort']}"
        assert pod["readinessProbe"]["tcpSocket"] == {"port": port["targetPort"]}
        config = load(tmp_path / "clusters.yaml")
        assert config.clusters[cluster].gateway == f"{made['Service']['metadata']['name']}:{port['port']}"
        to_gateway, to_workers = (each["spec"] for each in made["NetworkPolicy"])
        assert to_gateway["podSelector"]["matchLabels"] == labels
        assert to_gateway["ingress"] == [{"ports": [{"port": port["targetPort"], "protocol": "TCP"}]}]
        jobset = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": made["JobSet"]["metadata"]["name"]}}
        assert (to_workers["podSelector"], to_workers["ingress"]) == (jobset, [{"from": [{"podSelector": jobset}]}])


def create_secrets(folder: Path) -> dict[str, set[str]]:
    """The file names in each secret: the page's shell commands, for both clusters, with a `kubectl` that lists."""
    (folder / "certs").mkdir()
    files = ["ca.pem", "ca.key", "revoked.json"]
    for cluster in CLUSTERS:
        stems = [f"{cluster}-worker-{index}" for index in range(WORKERS["jobset"][cluster])] + [f"{cluster}-gateway-0"]
        files += [f"{stem}.{ending}" for stem in stems for ending in ("pem", "key")]
    for name in files:
        (folder / "certs" / name).touch()
    lists = '[ "$3" = create ] && echo "$6 $(ls "${7#--from-file=}" | xargs)" >> secrets'
    (folder / "kubectl").write_text(f"#!/bin/sh\n{lists}\ntrue\n")
    (folder / "kubectl").chmod(0o755)
    page = (DEPLOY / "jobset" / "README.md").read_text()
    commands = re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    for cluster in CLUSTERS:
        script = "set -e; rm -rf worker gateway\n" + commands.replace("gpu", cluster)
        environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", script], cwd=folder, env=environ, check=True, timeout=60)
    lines = (folder / "secrets").read_text().splitlines()
    return {name: set(names) for name, *names in map(str.split, lines)}


def read_gateway_command(command: list[str], folder: Path) -> GatewaySettings:
    """What a gateway's command comes to, with the configs in a folder."""
    assert command[:2] == ["whale-nebula", "gateway"]
    given = make_gateway_parser().read(command[2:])
    path = folder / Path(given.config).name
    site = GatewaySettings.from_config(load(path), given.cluster, path, given.listen)
    return site if given.audit is None else replace(site, audit=Path(given.audit))


@pytest.mark.parametrize("platform", ["slurm", "skypilot"])
def test_page_has_the_gateway_commands_of_both_clusters(platform: str) -> None:
    commands = re.findall(r"whale-nebula gateway [^\n]*?--cluster \w+", (DEPLOY / platform / "README.md").read_text())
    sites = [read_gateway_command(line.split(), DEPLOY / platform) for line in commands]
    assert [site.cluster for site in sites] == list(CLUSTERS)
    assert all(other is not None for site in sites for other in site.gateways.values())
    assert "not built" not in (DEPLOY / "README.md").read_text()


def find_values(value: Any, path: list[str]) -> list[Any]:
    """All that stands under a path; a list on the way is gone through."""
    if isinstance(value, list):
        return [each for item in value for each in find_values(item, path)]
    return find_values(value[path[0]], path[1:]) if path else [value]


def create_pod_environment(jobset: Any, job: Any, container: Any, index: int) -> dict[str, str]:
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
    def test_gateway_service_restarts_under_its_own_user(self) -> None:
        unit = configparser.ConfigParser(interpolation=None)
        unit.read(DEPLOY / "slurm" / "nebula-gateway.service")
        service = unit["Service"]
        given = make_gateway_parser().read(service["ExecStart"].split()[2:])
        assert (given.cluster, service["Restart"]) == ("gpu", "always")
        assert service["User"] == "nebula-gateway"
        assert Path(given.audit).parent == Path("/var/lib") / service["StateDirectory"]

    OPTIONS = frozenset({"job-name", "nodes", "ntasks-per-node", "gpus-per-task", "gres", "time", "signal", "output"})

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_slurm_tasks_resolve_all_workers(self, cluster: str, tmp_path: Path) -> None:
        script = DEPLOY / "slurm" / f"{cluster}.sbatch"
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.MULTILINE))
        assert set(asked) <= self.OPTIONS
        assert script.read_text().count("#SBATCH") == len(asked)
        command = run_script(["bash", str(script)], {"SLURM_SUBMIT_DIR": str(DEPLOY / "slurm")}, tmp_path)["command"]
        config = load(DEPLOY / "slurm" / command[command.index("--config") + 1])
        nodes, each = int(asked["nodes"]), int(asked["ntasks-per-node"])
        step = {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": f"node[01-{nodes:02d}]",
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        }
        placements = [
            resolve_command(config, command, {**step, "SLURM_PROCID": str(task)}) for task in range(nodes * each)
        ]
        check_placements("slurm", cluster, config, placements, "Slurm")


class TestSkyPilot:
    FIELDS = frozenset({"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run"})

    @pytest.mark.parametrize("cluster", CLUSTERS)
    def test_skypilot_nodes_resolve_all_workers(self, cluster: str, tmp_path: Path) -> None:
        task = read_yaml(DEPLOY / "skypilot" / f"{cluster}.yaml").value
        assert set(task) == self.FIELDS
        assert "ports" not in task["resources"]  # workers dial their gateway; nobody dials them
        assert re.findall(r"pip install (\S+)", task["setup"]) == ["./wheels/whale_nebula-*.whl"]
        config = load(DEPLOY / "skypilot" / task["file_mounts"]["~/nebula/clusters.yaml"])
        assert subprocess.run(["bash", "-n"], input=task["setup"].encode(), check=False).returncode == 0
        placements = []
        for rank in range(task["num_nodes"]):
            hosts = "\n".join(f"10.1.0.{number + 1}" for number in range(task["num_nodes"]))
            sky = {"SKYPILOT_NODE_IPS": hosts, "SKYPILOT_NODE_RANK": str(rank)}
            seen = run_script(["bash", "-c", task["run"]], sky, tmp_path)
            placements.append(resolve_command(config, seen["command"], {"TF_CONFIG": seen["tf_config"]}))
        check_placements("skypilot", cluster, config, placements, "TF_CONFIG")


def run_script(command: list[str], environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
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


def test_deploy_pages_are_linked() -> None:
    for folder in WORKERS:
        assert (DEPLOY / folder / "README.md").is_file()
        assert f"({folder})" in (DEPLOY / "README.md").read_text()
