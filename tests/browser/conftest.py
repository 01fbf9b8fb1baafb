"""One broker and one page for all tests of a worker, and a browser for those of a module."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.local.brokers import SemelBroker, semel_command
from tests.support.missing import skip_loudly
from tests.support.waiting import PATIENCE_S


class Site:
    """The process of `semel ui`."""

    def __init__(self, bootstrap: str, *options: str) -> None:
        words = semel_command("ui", "--brokers", bootstrap, "--listen", "127.0.0.1:0", *options)
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("semel ui on http://"), line + (
            self.process.stderr.read() if self.process.stderr else ""
        )
        self.url = line.split()[3]

    def close(self) -> str:
        """What it said on stderr."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return errors


@pytest.fixture(scope="session")
def shown_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SemelBroker]:
    with SemelBroker(tmp_path_factory.mktemp("shown") / "broker") as broker:
        yield broker


@pytest.fixture(scope="session")
def site(shown_broker: SemelBroker) -> Iterator[Site]:
    started = Site(shown_broker.bootstrap, "--allow-changes")
    yield started
    assert started.close() == "", "the server of the page ends without a complaint"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one module: Playwright keeps an event loop running in this thread, and a test of another module that calls
    `asyncio.run` in the same process would fail."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = os.environ.get("SEMEL_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if program is None or not Path(program).exists():
        skip_loudly("no Chromium (`make setup` installs it on Debian; SEMEL_CHROMIUM names one)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, site: Site) -> Iterator[Any]:
    """A page without a word of complaint: no error of a script, nothing that the content security policy stopped."""
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE_S * 1000)
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    opened.on("console", lambda line: complaints.append(line.text) if "Content Security" in line.text else None)
    yield opened
    context.close()
    assert complaints == []
