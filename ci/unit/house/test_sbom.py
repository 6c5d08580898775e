"""The software bill of materials is valid, whole, and says what is shipped and what only tests need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from ci import sbom
from inflight import __version__

pytestmark = pytest.mark.slow  # as far as it reads the metadata of all that is installed


def test_the_bill_of_materials_is_valid_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "dist" / "bill.json"
    monkeypatch.setattr("sys.argv", ["sbom", "--out", str(out)])
    sbom.main()
    text = out.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert bill["metadata"]["component"]["purl"] == f"pkg:pypi/inflight@{__version__}"
    assert bill["metadata"]["component"]["licenses"] == [{"expression": "Apache-2.0"}]
    found = {each["name"]: each for each in bill["components"]}
    assert {name: each["version"] for name, each in found.items()} == sbom.pinned()
    assert len(found) > 100
    scopes = {name: each["scope"] for name, each in found.items()}
    wanted = {"torch": "required", "nvidia-pytriton": "required", "markupsafe": "required", "ray": "optional"}
    wanted |= {"nvidia-cublas": "optional", "pytest": "excluded", "pluggy": "excluded", "editables": "excluded"}
    assert {name: scopes[name] for name in wanted} == wanted
    of = {each["ref"].partition("@")[0]: each.get("dependsOn", []) for each in bill["dependencies"]}
    assert f"pkg:pypi/markupsafe@{found['markupsafe']['version']}" in of["pkg:pypi/jinja2"]
    assert of["pkg:pypi/nvidia-pytriton"] == []
