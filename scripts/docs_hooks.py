"""What the site does differently from the pages in the repository: links to its files become their names, and the list
of decisions is made from the folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Pages that the navigation does not name yet stand at its end, so that none is lost."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    missing = sorted(page.name for page in DOCS.glob("*.md") if page.name not in named)
    if missing:
        config.nav.append({"More": missing})
    return config


def on_files(files: Any, config: Any) -> Any:
    """The decisions are pages without a place in the navigation: their list has them."""
    from mkdocs.structure.files import File, InclusionLevel

    for file in files:
        if file.src_uri.startswith("decisions/"):
            file.inclusion = InclusionLevel.NOT_IN_NAV
    index = File.generated(config, "decisions/index.md", content=decisions())
    files.append(index)
    return files


def decisions() -> str:
    """The list of decisions, by their headings."""
    lines = ["# Decisions", "", "Short pages about choices that others may wonder about.", ""]
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({page.name})")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = Path(page.file.src_uri).parent
    return LINK.sub(lambda match: _link(match, here), markdown)


def _link(match: re.Match[str], here: Path) -> str:
    text, target = match[1], match[2]
    path = target.partition("#")[0]
    if "://" in target or not path:
        return match[0]
    there = (DOCS / here / path).resolve()
    if there.is_dir():
        return f"[{text}]({Path(path) / 'index.md'})" if there.is_relative_to(DOCS) else text
    return match[0] if there.is_relative_to(DOCS) else text
