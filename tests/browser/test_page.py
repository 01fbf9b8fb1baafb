"""The page in a real browser: every view, an open transaction that is followed and aborted, hostile content."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import semel
from semel.client import Producer, TopicPartition
from semel.client.admin import Admin
from semel.local.brokers import SemelBroker
from semel.spark.ledger import LedgerEntry, Written
from semel.web.app import TICK_S
from tests.browser.conftest import Site
from tests.support.direct import DirectClient
from tests.support.waiting import PATIENCE_S, until

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'`${alert(3)}"
REVERSED = "\u202espuorg\n"  # looks like another name
LARGE_BYTES = 10 << 20


@pytest.fixture(scope="module")
def planted(shown_broker: SemelBroker) -> str:
    """Something for every view; records of any bytes and of 10 MB, hostile ids, keys and headers."""
    bootstrap = shown_broker.bootstrap
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topic("orders", partitions=2)
        admin.create_topic("hostile", partitions=1, configs={"max.message.bytes": str(LARGE_BYTES * 2)})
        admin.create_topic("spark.ledger", partitions=1, configs={"cleanup.policy": "compact"})
        with Producer(bootstrap_servers=bootstrap, max_request_size=LARGE_BYTES * 2, buffer_memory=64 << 20) as plain:
            for number in range(30):
                plain.send("orders", b'{"order": %d}' % number, partition=0)
            plain.send("hostile", HOSTILE, HOSTILE, headers=[(HOSTILE, HOSTILE.encode())]).result()
            plain.send("hostile", bytes(range(256)), b"\xff\xfe").result()
            plain.send("hostile", b"L" * LARGE_BYTES).result()
        with Producer(bootstrap_servers=bootstrap, transactional_id=HOSTILE) as producer:
            producer.init_transactions()
            with producer.transaction():
                producer.send("orders", b"committed", partition=1).result()
                producer.send_offsets_to_transaction({("orders", 0): 10}, semel.client.GroupMetadata(HOSTILE))
                producer.send_offsets_to_transaction({("orders", 0): 10}, semel.client.GroupMetadata(REVERSED))
            producer.begin_transaction()
            producer.send("orders", b"taken back", partition=1).result()
            producer.abort_transaction()
        with Producer(bootstrap_servers=bootstrap, transactional_id="spark") as producer:
            producer.init_transactions()
            entries = [("0", "10"), ("10", "20"), ("25", "30")]  # the last one does not begin where the one before ends
            for number, (start, end) in enumerate(entries):
                edges = [f'{{"orders":{{"0":{at}}}}}' for at in (start, end)]
                written = [Written("orders", 0, 5, number * 5, number * 5 + 4)]
                entry = LedgerEntry(number, "q", "r", number, [edges[0]], [edges[1]], written, rows=5, took_ms=1200)
                with producer.transaction():
                    producer.send("spark.ledger", entry.encode(), entry.key)
        with DirectClient(bootstrap, client_id="zombie") as client:
            pid, epoch = client.new_producer("twins")
            client.new_producer("twins")
            for _ in range(5):
                client.init_producer_id("twins", pid, epoch)
    return bootstrap


def go(page: Any, site: Site, view: str) -> Any:
    page.goto(f"{site.url}#/{view}")
    page.wait_for_selector("main[data-ready]")
    return page.locator("main")


@pytest.fixture
def prefixed(site: Site) -> Iterator[str]:
    """The page behind a proxy that serves it as /kafka/, and nothing else."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith("/kafka/"):
                self.send_error(404)
                return
            request = urllib.request.Request(site.url + self.path.removeprefix("/kafka/"))
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                self.send_response(response.status)
                self.send_header("Content-Type", response.headers["Content-Type"])
                self.end_headers()
                with suppress(OSError):  # the browser has closed its stream
                    while piece := response.read1():
                        self.wfile.write(piece)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        server.daemon_threads = True
        server.block_on_close = False
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/kafka/"
        finally:
            server.shutdown()
            serving.join()


def test_the_page_works_behind_a_proxy_under_a_path(page: Any, planted: str, prefixed: str) -> None:
    page.goto(f"{prefixed}#/topics")
    page.wait_for_selector("main[data-ready]")
    page.get_by_text("orders", exact=True).first.wait_for()  # what is shown first may be older than the topics
    page.wait_for_selector("#live.ok")


VIEWS = [
    ("", "Overview", ["topics", "transactional ids", "findings of the doctor"]),
    ("topics", "Topics", ["orders", "2 partitions", "0 · 30 · 30"]),
    ("topic?name=hostile", "hostile", ["max.message.bytes"]),
    (
        "records?topic=orders&partition=1&offset=0&markers=1",
        "orders-1",
        ["committed", "taken back", "aborted", "COMMIT", "ABORT"],
    ),
    ("transactions", "Transactions", ["twins", "CompleteCommit"]),
    ("transaction?id=spark", "spark", ["EndTxn", "5.1a", "5.3", "complete"]),
    ("producers", "Producer ids and epochs", ["twins", "PRODUCER_FENCED", "zombie"]),
    ("groups", "Groups", [HOSTILE]),
    ("applications", "Spark applications", ["spark", "1.2 s"]),
    (
        "application?id=spark",
        "spark",
        ["orders-0: 25 to 30", "gap: orders-0: the last batch ended at 20, this one starts at 25"],
    ),
    ("doctor", "The doctor", ["fenced-again: twins", "semel trace --transactional-id twins"]),
]  # fmt: skip


WITHOUT_NAME = """() => [...document.querySelectorAll("a, button, input, select, svg[role], [role=region]")]
    .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.length))
    .map((node) => node.outerHTML)"""


def test_every_view_shows_what_there_is_with_names_for_everything(page: Any, site: Site, planted: str) -> None:
    for view, title, texts in VIEWS:
        main = go(page, site, view)
        main.get_by_role("heading", name=title, exact=True, level=1).wait_for()
        for text in texts:
            page.wait_for_function("text => document.querySelector('main').innerText.includes(text)", arg=text)
        unnamed = page.evaluate(WITHOUT_NAME)
        assert unnamed == [], view
    assert page.get_by_role("status").inner_text() == "live"


def test_an_open_transaction_is_found_followed_and_aborted_and_readers_go_on(
    page: Any, site: Site, planted: str
) -> None:
    with Admin(bootstrap_servers=planted) as admin:
        admin.create_topic("held", partitions=1, if_not_exists=True)
        options = {"transactional_id": "nightly", "client_id": "importer", "transaction_timeout_ms": 900_000}
        with Producer(bootstrap_servers=planted, **options) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            for _ in range(5):
                producer.send("held", b"open").result()

            def stable() -> int:
                return admin.list_offsets({("held", 0): -1}, read_committed=True)[TopicPartition("held", 0)].offset

            assert stable() == 0
            go(page, site, "topics?held=1")
            page.get_by_role("img", name=re.compile(r"^held-0: .* 5 held back by nightly$")).wait_for()
            page.get_by_text("5 held back by").first.wait_for()
            page.get_by_role("link", name="nightly", exact=True).first.click()
            page.get_by_role("heading", name="nightly", exact=True).wait_for()
            for step in ("1", "2", "3", "4.2"):
                page.locator("ol.line .n", has_text=re.compile(f"^{re.escape(step)}$")).first.wait_for()
            page.get_by_text("by importer").first.wait_for()
            page.get_by_role("button", name="Abort …").click()
            page.get_by_role("button", name="Cancel").click()
            assert stable() == 0, "a question is not an answer"
            page.get_by_role("button", name="Abort …").click()
            page.get_by_role("button", name="Abort it").click()
            page.locator("main .chip", has_text="Empty").or_(
                page.locator("main .chip", has_text="CompleteAbort")
            ).first.wait_for()
            until(lambda: stable() == 6, "the last stable offset does not move")
            go(page, site, "topics?q=held")
            page.get_by_role("img", name=re.compile(r"^held-0: start 0, last stable offset 6, end 6$")).wait_for()
            with pytest.raises(semel.FencedError):
                producer.commit_transaction()


def test_a_view_that_takes_longer_than_a_tick_is_shown_all_the_same(page: Any, site: Site, planted: str) -> None:
    page.add_init_script(
        f"""const fetched = window.fetch, Source = window.EventSource;
        window.ticks = 0;
        window.fetch = (...all) => new Promise((go) => setTimeout(go, {2 * TICK_S * 1000})).then(() => fetched(...all));
        window.EventSource = class extends Source {{
            constructor(...all) {{ super(...all); this.addEventListener("message", () => window.ticks++); }}
        }};"""
    )
    main = go(page, site, "topics?q=orders")
    main.get_by_role("heading", name="Topics", exact=True, level=1).wait_for()
    assert page.evaluate("ticks") >= 2, "the page was to read again before the first reading had ended"


def test_a_reading_that_gets_no_response_is_not_awaited_for_ever(page: Any, site: Site, planted: str) -> None:
    """As behind a network that is gone: nothing comes, and nobody says so."""
    page.add_init_script(
        """const fetched = window.fetch, timeout = AbortSignal.timeout;
        let isFirst = true;
        AbortSignal.timeout = () => timeout.call(AbortSignal, isFirst ? 100 : 60000);
        window.fetch = (path, options) => {
            if (!path.startsWith("api/topics") || !isFirst) return fetched(path, options);
            isFirst = false;
            return new Promise((_, fail) => options.signal.addEventListener("abort", () => {
                window.gaveUp = true;
                fail(options.signal.reason);
            }));
        };"""
    )
    main = go(page, site, "topics?q=orders")
    main.get_by_role("heading", name="Topics", exact=True, level=1).wait_for()
    assert page.evaluate("gaveUp"), "the first reading had a response"


def test_hostile_and_large_content_is_shown_as_text_and_never_runs(page: Any, site: Site, planted: str) -> None:
    main = go(page, site, "records?topic=hostile&partition=0&offset=0")
    assert main.locator("pre.bytes").filter(has_text="<img src=x").count() >= 3, "key, value and header"
    assert main.get_by_text("00 01 02 03").count() == 1, "not text: hexadecimal"
    main.get_by_role("button", name="Next").click()  # a piece of a log has at most a megabyte, or one batch
    main.get_by_text("10.0 MB").first.wait_for()
    assert page.locator("main img, main script").count() == 0
    with page.expect_download() as download:
        main.get_by_role("link", name="save").last.click()
    with open(download.value.path(), "rb") as saved:
        assert saved.read() == b"L" * LARGE_BYTES
    go(page, site, "transactions")
    page.get_by_role("link", name=HOSTILE).click()
    page.get_by_role("heading", name=HOSTILE).wait_for()
    assert page.locator("main img, main script").count() == 0
    go(page, site, "groups")
    page.get_by_role("link", name=r"\u202espuorg\n").click()
    page.get_by_role("heading", name=r"\u202espuorg\n").wait_for()
    go(page, site, "topic?name=" + "%3Cscript%3Ealert(1)%3C/script%3E")
    page.get_by_role("heading", name="Not found").wait_for()


def test_the_keyboard_is_enough_and_colours_can_be_switched(page: Any, site: Site, planted: str) -> None:
    go(page, site, "")
    page.keyboard.press("2")
    page.get_by_role("heading", name="Topics").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("spark")
    page.get_by_text("1 topic", exact=True).wait_for()
    assert page.evaluate("document.activeElement.id") == "search", "what is typed stays where it is typed"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    page.wait_for_selector("main[data-ready]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before, "it is remembered"


def test_a_broker_that_goes_and_comes_back_is_said_and_the_page_recovers(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with SemelBroker(tmp_path_factory.mktemp("restarted") / "broker") as broker:
        with Admin(bootstrap_servers=broker.bootstrap) as admin:
            admin.create_topic("before", partitions=1)
        started = Site(broker.bootstrap, "--timeout", "2")
        context = browser.new_context(viewport={"width": 400, "height": 800})
        try:
            page = context.new_page()
            page.set_default_timeout(PATIENCE_S * 1000)
            page.goto(f"{started.url}#/topics")
            page.get_by_text("before").first.wait_for()
            broker.kill()
            page.get_by_role("alert").get_by_text("do not respond").wait_for()
            assert page.get_by_text("before").count() >= 1, "what was shown stays"
            broker.start()
            page.locator("#live.ok").wait_for()
            page.locator("#banner").wait_for(state="hidden")
            with Admin(bootstrap_servers=broker.bootstrap) as admin:
                admin.create_topic("after", partitions=1)
            page.get_by_text("after", exact=True).first.wait_for()
            width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert width[0] <= width[1], "nothing hangs over on a narrow screen"
        finally:
            context.close()
            started.close()
