"""The site of the documentation without a web server: opened from a folder, its search finds what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_search_works_on_pages_that_were_opened_from_a_folder(browser: Any, tmp_path: Path) -> None:
    site = tmp_path / "site"
    words = [str(Path(sys.executable).with_name("mkdocs")), "build", "--quiet", "--strict", "--site-dir", str(site)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    complaints: list[str] = []
    requested: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").fill("hanging transaction")
    found = page.locator(".md-search-result__link[href*='doctor.html']").first
    found.wait_for()
    found.click()
    page.wait_for_url("**/doctor.html*")
    context.close()
    assert complaints == []
    assert [url for url in requested if not url.startswith(("file:", "data:", "about:", "blob:"))] == []
