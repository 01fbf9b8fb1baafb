"""Who may use the page, request by request, without a browser."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from semel.local.brokers import SemelBroker, semel_command
from semel.local.processes import free_ports
from semel.web.app import RequestGuard, UiOptions
from tests.browser.conftest import Site
from tests.support.waiting import PATIENCE_S, until


def ask(
    url: str, method: str = "GET", path: str = "/", body: object = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def read_only(shown_broker: SemelBroker) -> Iterator[Site]:
    started = Site(shown_broker.bootstrap)
    yield started
    started.close()


def test_other_names_and_other_sites_are_refused(site: Site) -> None:
    assert ask(site.url)[0] == 200
    port = urlsplit(site.url).port
    assert ask(site.url, Host=f"localhost:{port}")[0] == 200
    assert ask(site.url, Host=f"attacker.example:{port}")[0] == 421, "a name that points at this machine"
    assert ask(site.url, Host="127.0.0.1:1")[0] == 421
    assert ask(site.url, path="/api/overview", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(site.url, path="/api/overview", Sec_Fetch_Site="same-site")[0] == 403, "another port of this machine"
    for origin in ("http://attacker.example", "http://[", "null"):
        assert ask(site.url, path="/api/overview", Origin=origin)[0] == 403
    assert ask(site.url, path="/api/overview", Sec_Fetch_Site="same-origin")[0] == 200


def test_changes_need_a_post_of_this_page_and_the_option(site: Site, read_only: Site) -> None:
    body = {"id": "nobody"}
    good = {"Content_Type": "application/json", "X_Semel": "1"}
    assert ask(site.url, "GET", "/api/abort?id=nobody")[0] == 405, "no GET changes anything"
    assert ask(site.url, "POST", "/api/abort", body, Content_Type="application/json")[0] == 403
    assert ask(site.url, "POST", "/api/abort", body, Content_Type="text/plain")[0] == 403, "what a form could send"
    assert ask(site.url, "POST", "/api/abort", body, **good, Origin="http://attacker.example")[0] == 403
    status, _, said = ask(site.url, "POST", "/api/abort", body, **good, Origin=site.url.rstrip("/"))
    assert (status, "there is no transactional id" in said.decode()) == (502, True)
    for nonsense in ({"nonsense": 1}, [], None, "id"):
        assert ask(site.url, "POST", "/api/abort", nonsense, **good)[0] == 400
    hanging = {"topic": "t", "partition": float("inf"), "start_offset": 0}
    assert ask(site.url, "POST", "/api/abort-hanging", hanging, **good)[0] == 400
    status, _, said = ask(read_only.url, "POST", "/api/abort", body, **good)
    assert (status, "--allow-changes" in said.decode()) == (403, True)


def test_nothing_is_cached_sniffed_or_framed_and_scripts_come_from_here_alone(site: Site) -> None:
    for path in ("/", "/static/app.js", "/api/overview", "/nowhere"):
        _, headers, _ = ask(site.url, path=path)
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
    static = Path(__file__).parents[2] / "src" / "semel" / "web" / "static"
    text = "\n".join(file.read_text(encoding="utf-8") for file in static.iterdir())
    addresses = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert "http://" not in addresses, "the page works offline"
    assert "https://" not in addresses
    assert "innerHTML" not in text
    assert "eval(" not in text


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/%2e%2e/app.py", "/api/records?topic=x&partition=0", "/api/topic?name=%00",
        "/api/transaction?id=%ff%fe", "/api/group?id=nobody",
    ],
)  # fmt: skip
def test_what_is_not_there_is_not_found(site: Site, path: str) -> None:
    assert ask(site.url, path=path)[0] == 404


@pytest.mark.parametrize(
    "path", ["/api/records?topic=x&partition=abc", "/api/topics?page=x", "/api/topic", "/api/records"]
)
def test_nonsense_is_refused_in_words(site: Site, path: str) -> None:
    status, _, said = ask(site.url, path=path)
    assert status == 400
    assert "makes no sense" in json.loads(said)["error"]


def test_a_token_is_needed_elsewhere_than_on_loopback(shown_broker: SemelBroker) -> None:
    (port,) = free_ports(1)
    words = semel_command("ui", "--brokers", shown_broker.bootstrap, "--listen", f"0.0.0.0:{port}")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        token = line.split("?token=")[1].split()[0]
        url = f"http://127.0.0.1:{port}/"
        until(lambda: ask(url)[0] == 401, "the page is not served")
        assert ask(url, path="/api/overview")[0] == 401
        assert ask(url, path="/?token=wrong")[0] == 401
        assert ask(url, path=f"/api/overview?token={token}")[0] == 401, "only the page itself takes it from the address"
        status, headers, _ = ask(url, path=f"/?token={token}")
        assert status == 303
        assert "HttpOnly" in headers["set-cookie"]
        assert "samesite=strict" in headers["set-cookie"].lower()
        assert ask(url, path="/api/overview", Cookie=headers["set-cookie"].split(";")[0])[0] == 200
        assert ask(url, path="/api/overview", Authorization=f"Bearer {token}")[0] == 200
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_two_pages_with_tokens_on_one_host_keep_out_of_each_others_way(shown_broker: SemelBroker) -> None:
    """A browser sends the cookies of one port to the others, too."""
    tokens = ["one of two", "a+b/c=&;"]
    pages = [Site(shown_broker.bootstrap, "--token", token) for token in tokens]
    try:
        kept: dict[str, str] = {}
        for page in pages:
            address = urlsplit(page.url)
            until(lambda page=page: ask(page.url)[0] == 401, "the page is not served")
            status, headers, _ = ask(page.url, path=f"/?{address.query}")
            assert status == 303, page.url
            name, _, value = headers["set-cookie"].split("; ")[0].partition("=")
            kept[name] = value
        cookies = "; ".join(f"{name}={value}" for name, value in kept.items())
        assert [ask(page.url, path="/api/overview", Cookie=cookies)[0] for page in pages] == [200, 200]
    finally:
        for page in pages:
            page.close()


def test_a_page_behind_a_proxy_with_a_name_of_its_own_may_change_things(shown_broker: SemelBroker) -> None:
    page = Site(shown_broker.bootstrap, "--listen", "0.0.0.0:0", "--token", "secret", "--allow-changes")
    try:
        url = page.url.replace("0.0.0.0", "127.0.0.1")
        until(lambda: ask(url)[0] == 401, "the page is not served")
        passed_on = {"Host": "kafka.example", "Origin": "https://kafka.example", "Authorization": "Bearer secret"}
        status, _, said = ask(url, "POST", "/api/abort", {"id": "nobody"}, X_Semel="1", **passed_on)
        assert (status, "there is no transactional id" in said.decode()) == (502, True)
    finally:
        page.close()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 80), ("LocalHost", 8090)])
def test_hosts_are_compared_as_browsers_write_them(host: str, port: int) -> None:
    options = UiOptions({"bootstrap_servers": "127.0.0.1:1"}, host, port)
    guard = RequestGuard(Starlette(), options)
    for name in ("localhost", "127.0.0.1"):
        written = name if port == 80 else f"{name}:{port}"
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "scheme": "http"}
        request = Request(scope | {"server": (host, port), "headers": [(b"host", written.encode())]})
        assert guard._refusal(request) is None


def test_a_page_that_ends_while_its_cluster_is_away_makes_no_noise() -> None:
    with closing(Site("127.0.0.1:1")) as page:
        assert page.process.stderr is not None
        assert "cannot connect to 127.0.0.1:1" in page.process.stderr.readline(), "it reads by now"
        assert page.close() == ""


def test_the_broker_serves_the_page_itself_and_takes_it_with_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/"

    def responds() -> bool:
        try:
            return ask(url, path="/api/overview")[0] == 200
        except OSError:
            return False

    with SemelBroker(tmp_path / "broker", "--ui", str(port)) as broker:
        until(responds, "the page is not served")
        broker.kill()
    until(lambda: not responds(), "the page outlives the broker")
