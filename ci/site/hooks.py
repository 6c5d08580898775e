"""What mkdocs calls: it gives the site the pages from where they stand, their navigation, and llms.txt.

Pages keep their paths, so links between them stay as they are. What they link to beside pages, files and folders of
code, is put into the site as plain text: the file, or the names in the folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from ci.site.pages import ROOT, all_pages

LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")
PICTURES = {".svg", ".png"}
FROM_TOP = "docs/pictures/"


def on_config(config: MkDocsConfig) -> None:
    nav: dict[str, list[dict[str, str]]] = {}
    for page in all_pages():
        nav.setdefault(page.section, []).append({page.title: page.path})
    config.nav = [{section: pages} for section, pages in nav.items()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in all_pages():
        files.append(File.generated(config, page.path, abs_src_path=str(ROOT / page.path)))
        for path in linked(ROOT / page.path):
            name = site_name(path)
            if files.get_file_from_path(name) is None:
                if path.suffix in PICTURES:
                    files.append(File.generated(config, name, abs_src_path=str(path)))
                else:
                    files.append(File.generated(config, name, content=as_text(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to what is no page lead to its text. A link to nothing is left for mkdocs to complain of."""
    folder = ROOT / os.path.dirname(page.file.src_uri)

    def to_text(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target.suffix == ".md" or target.suffix in PICTURES or not target.exists():
            return link[0]
        return f"]({os.path.relpath(ROOT / site_name(target), folder)}"

    return LINK.sub(to_text, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """llms.txt, which tells programs what each page is about; and each page beside it as it is written."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    section = ""
    for page in all_pages():
        if page.section != section:
            section = page.section
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{page.title}]({page.path}): {page.question}")
        copy = Path(config.site_dir, page.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / page.path).read_bytes())
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def linked(page: Path) -> list[Path]:
    """Files and folders that a page links to, and that are no pages themselves."""
    targets = {(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))}
    return sorted(path for path in targets if path.exists() and path.suffix != ".md")


def site_name(path: Path) -> str:
    name = str(path.relative_to(ROOT))
    return name if path.suffix in PICTURES else f"{name}/index.txt" if path.is_dir() else f"{name}.txt"


def as_text(path: Path) -> str:
    if path.is_dir():
        return "".join(f"{each.name}\n" for each in sorted(path.iterdir()) if not each.name.startswith("__"))
    return path.read_text(encoding="utf-8")
