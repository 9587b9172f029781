"""The live page of a real server, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ..browser import chromium_page
from .harness import API_KEY, PATIENCE_S, Chat, Client

PATHS = ["/intentkv/dashboard", "/intentkv/plotly.js"]
TIMED = ["pool", "hits", "evictions"]
"""Charts over time."""


def url(server: Client, path: str) -> str:
    return str(server.http.base_url.join(path))


def time_axis(page: Any, chart: str) -> list[float]:
    """Ends of its time axis, milliseconds since 1970."""
    ends: list[float] = page.evaluate("(id) => document.getElementById(id).layout.xaxis.range.map((end) => Number(new Date(end)))", chart)
    return ends


@pytest.mark.parametrize("path", PATHS)
def test_page_follows_the_api_key(tight: Client, path: str) -> None:
    """Catches a page that tells a stranger what the server does."""
    assert httpx.get(url(tight, path)).status_code == httpx.codes.UNAUTHORIZED
    assert tight.http.get(path).status_code == httpx.codes.OK


def test_stock_server_has_no_page(stock: Client) -> None:
    """Catches routes that are added without the plugin being selected."""
    assert [stock.http.get(path).status_code for path in PATHS] == [httpx.codes.NOT_FOUND] * 2


def test_page_draws_the_status_and_refreshes(served: Client, new_chat: Callable[[], Chat]) -> None:
    """Catches a page that does not draw, shows other numbers than the status, or stands still."""
    chat = new_chat()
    with chromium_page() as page:
        page.set_default_timeout(PATIENCE_S * 1000)
        requested: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        page.goto(url(served, PATHS[0]))
        page.wait_for_selector("body[data-samples='1']")
        before = served.status()["counters"]["prune_events"]
        for role, size in [("system", 20), ("user", 60), ("tool", 90), ("tool", 70)]:
            answer = served.generate(chat.say(role, size).ask(), 10, {"budget": 120, "hysteresis": 0}, session_id="shown")
            chat.answered(answer.output_ids)
        status = served.idle_status()
        assert status["counters"]["prune_events"] > before
        seen = int(page.locator("body").get_attribute("data-samples"))
        page.wait_for_function(f"Number(document.body.dataset.samples) >= {seen + 2}")
        assert page.locator("#error").inner_text() == ""
        for chart in ("pool", "hits", "evictions", "sessions"):
            assert page.locator(f"#{chart} .main-svg").count() >= 1, chart
        for chart in TIMED:
            first, last = time_axis(page, chart)
            pool_first, pool_last = time_axis(page, "pool")
            assert last - first >= 60_000, "ticks are fractions of a second"
            assert abs(first - pool_first) + abs(last - pool_last) < 0.1 * (pool_last - pool_first), chart
        newest = page.evaluate("Object.fromEntries(document.getElementById('pool').data.map((t) => [t.name, t.y.at(-1)]))")
        assert newest["dead (pruned, no slot)"] == status["pool"]["dead"]
        assert newest["evictable (live, cached)"] == status["pool"]["evictable"]
        assert sum(value for name, value in newest.items() if "dead" not in name) == status["pool"]["total"]
        tile = page.locator(".tile", has_text="evictions").first
        assert tile.locator("b").inner_text() == f"{status['counters']['prune_events']:,}"
        assert page.locator("#sessions").inner_text().count("id:shown") == 1
    own = str(served.http.base_url).rstrip("/")
    assert all(address.startswith((own, "data:", "blob:")) for address in requested), "the page asks others, too"


def test_page_of_an_idle_server(served: Client) -> None:
    """Catches pictures without anything to show that name a time of their own."""
    with chromium_page() as page:
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(url(served, PATHS[0]))
        page.wait_for_selector("body[data-samples='1']")
        for chart in TIMED:
            assert time_axis(page, chart)[0] > page.evaluate("Date.now()") - PATIENCE_S * 1000, chart


def test_page_keeps_the_zoom(served: Client) -> None:
    """Catches a refresh that takes back what the viewer chose to see."""
    with chromium_page() as page:
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(url(served, PATHS[0]))
        page.wait_for_selector("body[data-samples='2']")
        area = page.locator("#pool .nsewdrag").first.bounding_box()
        left, width, middle = area["x"], area["width"], area["y"] + area["height"] / 2
        whole = time_axis(page, "pool")
        page.mouse.move(left + 0.5 * width, middle)
        page.mouse.down()
        page.mouse.move(left + 0.9 * width, middle, steps=5)
        page.mouse.up()
        page.wait_for_function("document.getElementById('pool').layout.xaxis.autorange === false")
        zoomed = time_axis(page, "pool")
        assert zoomed[1] - zoomed[0] < 0.6 * (whole[1] - whole[0])
        seen = int(page.locator("body").get_attribute("data-samples"))
        page.wait_for_function(f"Number(document.body.dataset.samples) >= {seen + 2}")
        assert time_axis(page, "pool") == zoomed


def test_page_works_with_the_key_in_a_header(tight: Client, new_chat: Callable[[], Chat]) -> None:
    """Catches a page whose own requests lose the key that a proxy adds."""
    with chromium_page(extra_http_headers={"Authorization": f"Bearer {API_KEY}"}) as page:
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(url(tight, PATHS[0]))
        page.wait_for_selector("#pool .main-svg")
        assert page.locator("#error").inner_text() == ""
