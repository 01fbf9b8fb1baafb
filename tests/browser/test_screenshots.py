"""Pictures of the page, for its documentation: `build/screenshots` has one of every view of a cluster with an open
transaction. Those in docs/images show a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from semel.client import Producer
from semel.client.admin import Admin
from semel.local.brokers import SemelBroker
from tests.browser.conftest import Site
from tests.support.waiting import PATIENCE_S

FOLDER = Path(__file__).parents[2] / "build" / "screenshots"
VIEWS = ("overview", "topics", "transactions", "producers", "groups", "applications", "doctor")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_every_view_has_a_picture(browser: Any, tmp_path: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        SemelBroker(tmp_path / "broker") as broker,
        Admin(bootstrap_servers=broker.bootstrap) as admin,
        Producer(bootstrap_servers=broker.bootstrap) as producer,
        Producer(bootstrap_servers=broker.bootstrap, transactional_id="nightly-import") as importer,
    ):
        for topic, partitions in (("orders", 6), ("payments", 3)):
            admin.create_topic(topic, partitions=partitions)
            for number in range(200):
                producer.send(topic, b"%d" % number, b"%d" % number)
        producer.flush()
        admin.alter_group_offsets("billing", {("orders", index): 10 for index in range(6)})
        importer.init_transactions()
        importer.begin_transaction()
        for index in range(3):
            importer.send("orders", b"open", partition=index).result()
        site = Site(broker.bootstrap)
        context = browser.new_context(viewport={"width": 1280, "height": 860})
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        try:
            page.goto(site.url)
            for number, name in enumerate(VIEWS, 1):
                page.keyboard.press(str(number))
                page.locator(f"main[data-view={name}][data-ready]").wait_for()
                if name == "topics":
                    page.get_by_text("held back by").first.wait_for()
                page.screenshot(path=FOLDER / f"page-{name}.png")
        finally:
            context.close()
            site.close()
    assert {path.stem for path in FOLDER.glob("page-*.png")} >= {f"page-{name}" for name in VIEWS}
    assert min(path.stat().st_size for path in FOLDER.glob("page-*.png")) > 5_000
