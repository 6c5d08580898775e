"""The manifests of backend/kubernetes are valid by Kubernetes' own schemas, fit each other, and start what there is.

No schema of LeaderWorkerSet can be had from a package index: its pods are checked as pod templates.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from inflight.executor.launchers import external
from inflight.executor.rank import launch_source, outer_worker
from inflight.supervisor import repository
from inflight_client.cli import app

FOLDER = Path(__file__).parents[3] / "backend" / "kubernetes"
MODELS = Path(__file__).parents[3] / "model_repository"
FILES = sorted(FOLDER.glob("*.yml"))
"""One for each way to lay an engine out."""


def load(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def templates(file: Path) -> list[dict[str, Any]]:
    """Of pods."""
    found = []
    for resource in load(file):
        if resource["kind"] == "Deployment":
            found.append(resource["spec"]["template"])
        elif resource["kind"] == "LeaderWorkerSet":
            group = resource["spec"]["leaderWorkerTemplate"]
            found += [group["leaderTemplate"], group["workerTemplate"]]
    return found


def containers(file: Path) -> list[dict[str, Any]]:
    return [container for template in templates(file) for container in template["spec"]["containers"]]


def filled_in(text: str) -> str:
    """With a checkpoint that there is, and as a group of two."""
    for variable in ("$(LWS_GROUP_SIZE)", "$LWS_GROUP_SIZE"):
        text = text.replace(variable, "2")
    return text.replace("/checkpoints/model", str(MODELS / "llm" / "1" / "checkpoint"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_resource_is_valid(file: Path) -> None:
    version = kubernetes_validate.latest_version()
    resources = [resource for resource in load(file) if resource["kind"] != "LeaderWorkerSet"]
    resources += [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        for template in templates(file)
    ]
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    (deployment,) = (resource for resource in load(FOLDER / "one_node.yml") if resource["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_that_are_used_are_there(file: Path) -> None:
    for template in templates(file):
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            ports = {port["name"] for port in container.get("ports", [])}
            probes = [container[key] for key in ("startupProbe", "readinessProbe") if key in container]
            assert {probe["httpGet"]["port"] for probe in probes} <= ports
    (service,) = (resource for resource in load(file) if resource["kind"] == "Service")
    selected = service["spec"]["selector"].items()
    serving = [template for template in templates(file) if selected <= template["metadata"]["labels"].items()]
    assert len(serving) == 1
    offered = {port["name"] for container in serving[0]["spec"]["containers"] for port in container.get("ports", [])}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == offered


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_commands_start_ranks_that_the_server_takes(file: Path, tmp_path: Path) -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    (server,) = (container for container in containers(file) if "args" in container)
    arguments = [filled_in(argument) for argument in server["args"]]
    options = command.make_context("serve", arguments).params
    parameters = dict(assignment.split("=") for assignment in options["set_"] or ())
    if tensor_parallel_size := options["tensor_parallel_size"]:
        parameters["tensor_parallel_size"] = str(tensor_parallel_size)
    folder = next(iter(options["models"] or ()), None)
    front = repository.write(MODELS, tmp_path / "models", checkpoint_folder=folder, parameters=parameters).config
    scripts = [resource["data"]["ranks.sh"] for resource in load(file) if resource["kind"] == "ConfigMap"]
    assert front is not None and (front.executor == "external") == bool(scripts)
    for script in scripts:
        words = shlex.split(filled_in(script.replace("\\\n", " ")))
        ranks = outer_worker._parser().parse_args(words[words.index("inflight.worker") + 1 :])
        _, config = launch_source.read_engine_config(MODELS / "llm", dict(ranks.set))
        external._check_equal(config.to_parameters(), front.to_parameters())
