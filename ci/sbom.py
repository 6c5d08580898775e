"""Writes the software bill of materials (CycloneDX) of what constraints.txt pins, as it counts for this Python and
platform:

    python -m ci.sbom              # dist/inflight-VERSION.cdx.json

A component's scope is required if the wheel or `inflight install-server` installs it; optional if an extra of the wheel
does, or machines other than this one need it, as torch's build for GPUs does its libraries; excluded if it only builds
and tests the project. Dependencies, and licences where they are named in SPDX's terms, are read from what is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci.installed_packages import needed, requirements
from inflight import __version__
from inflight.supervisor.install_server import PACKAGE

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = ("analyze", "gpu", "server")
"""Of the wheel, but not for its development."""
EDITABLE = "editables"
"""What an editable install asks for, and no wheel."""


def pinned() -> dict[str, str]:
    """Package -> version of the lines of constraints.txt whose markers hold here."""
    lines = (line.partition("#")[0].strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line]
    return {
        canonicalize_name(each.name): next(iter(each.specifier)).version
        for each in found
        if each.marker is None or each.marker.evaluate()
    }


def make_bom() -> Bom:
    direct = [each for each in requirements("inflight") if each.name != EDITABLE]
    required = needed(direct) | {PACKAGE}
    optional = needed(requirements("inflight", EXTRAS))
    excluded = needed(requirements("inflight", ("dev",))) - required - optional | {EDITABLE}
    components: dict[str, Component] = {}
    for name, version in pinned().items():
        scope = ComponentScope.EXCLUDED if name in excluded else ComponentScope.OPTIONAL
        components[name] = _component(name, version, scope=ComponentScope.REQUIRED if name in required else scope)
    bom = Bom(components=components.values())
    bom.metadata.component = root = _component("inflight", __version__, kind=ComponentType.APPLICATION)
    bom.register_dependency(root, _named(components, [*direct, Requirement(PACKAGE)]))
    for name, component in components.items():
        asked = requirements(name) if name != PACKAGE else []  # it is installed without them
        bom.register_dependency(component, _named(components, asked))
    return bom


def _named(components: dict[str, Component], asked: list[Requirement]) -> list[Component]:
    names = sorted({canonicalize_name(each.name) for each in asked})
    return [components[name] for name in names if name in components]


def _component(
    name: str, version: str, *, scope: ComponentScope | None = None, kind: ComponentType = ComponentType.LIBRARY
) -> Component:
    url = PackageURL("pypi", name=name, version=version)
    return Component(
        name=name, version=version, type=kind, scope=scope, purl=url, bom_ref=str(url), licenses=_licences(name)
    )


def _licences(package: str) -> list[License]:
    try:
        named = importlib.metadata.metadata(package).get_all("License-Expression")
    except importlib.metadata.PackageNotFoundError:
        return []
    return [LicenseFactory().make_with_expression(each) for each in named or []]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the software bill of materials of what constraints.txt pins.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / f"inflight-{__version__}.cdx.json")
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(JsonV1Dot6(make_bom()).output_as_string(indent=1) + "\n", encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
