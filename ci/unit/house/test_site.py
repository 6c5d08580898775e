"""The site of all pages: it is whole, loads nothing from elsewhere, and is not built with a broken link."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from ci.site.pages import ROOT, all_pages

pytestmark = pytest.mark.slow

CONFIGURATION = ROOT / "ci" / "site" / "mkdocs.yml"


def configured(folder: Path) -> Any:
    return load_config(str(CONFIGURATION), site_dir=str(folder), strict=True)


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    build(configured(tmp_path))
    listed = re.findall(r"^- \[.+?\]\((.+?)\): .+$", (tmp_path / "llms.txt").read_text("utf-8"), re.MULTILINE)
    assert listed == [page.path for page in all_pages()]
    assert [path for path in listed if (tmp_path / path).read_bytes() != (ROOT / path).read_bytes()] == []
    pages = [page for page in tmp_path.rglob("*.html") if page.name != "404.html"]
    assert len(pages) == len(listed)
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\" >]+)", page.read_text("utf-8"))
        assert loaded == [], page


@pytest.mark.parametrize("link", ["nothing.md", "CONTRIBUTING.md#nothing", "backend/nothing.py"])
def test_a_link_to_nothing_fails(tmp_path: Path, link: str) -> None:
    config = configured(tmp_path)

    def broken(markdown: str, page: Any, **_: Any) -> str:
        return markdown + f"\n\n[broken]({link})\n" * (page.file.src_uri == "README.md")

    config.plugins._register_event("page_markdown", broken)
    with pytest.raises(Abort, match="in strict mode"):
        build(config)
