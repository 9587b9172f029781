"""The HTTP side: options of a request are checked in the main process and travel on as text; the control route."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from intentkv.config import ConfigError, RequestOptions, parse_request_options
from intentkv_sglang import dashboard
from intentkv_sglang.routes import add_routes, validate_request

pytestmark = pytest.mark.unit


def make_request(custom_params):
    return SimpleNamespace(sampling_params={"temperature": 0, "custom_params": custom_params})


@pytest.mark.parametrize("options", [
    {"keep": [[0, 5], [7, 9]], "budget": 100},
    {"method": "snapkv", "hysteresis": 0},
    {"budget_ratio": 0.25},
    {},
])  # fmt: skip
def test_valid_options_become_text(options):
    """Nested lists do not survive SGLang's wire type; other entries of custom_params stay, and so does the client's own object."""
    params = {"other": [1], "intentkv": options}
    obj = make_request(params)
    validate_request(None, obj)
    sent = obj.sampling_params["custom_params"]
    assert json.loads(sent["intentkv"]) == options
    assert parse_request_options(sent["intentkv"]) == RequestOptions.model_validate(options)
    assert sent["other"] == [1]
    assert params == {"other": [1], "intentkv": options}
    # SGLang may validate one object twice.
    validate_request(None, obj)
    assert json.loads(obj.sampling_params["custom_params"]["intentkv"]) == options


@pytest.mark.parametrize("options", [
    {"budget": 0},
    {"budget": "many"},
    {"budget": 5, "budget_ratio": 0.5},
    {"budget_ratio": 1.5},
    {"method": "no-such"},
    {"keep": [[5, 5]]},
    {"keep": [[1]]},
    {"unknown": 1},
    [1, 2],
    7,
    "{",
])  # fmt: skip
def test_invalid_options_are_one_sentence(options):
    """SGLang answers a ValueError with a 400 for this request."""
    obj = make_request({"intentkv": options})
    with pytest.raises(ValueError, match=r"custom_params\['intentkv'\]") as caught:
        validate_request(None, obj)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert obj.sampling_params["custom_params"] == {"intentkv": options}


@pytest.mark.parametrize("params", ["text", [1], 7])
def test_custom_params_of_another_type(params):
    with pytest.raises(ConfigError, match="custom_params must be a JSON object"):
        validate_request(None, make_request(params))


@pytest.mark.parametrize("obj", [
    SimpleNamespace(),
    SimpleNamespace(sampling_params=None),
    SimpleNamespace(sampling_params={"temperature": 1}),
    SimpleNamespace(sampling_params={"custom_params": None}),
    SimpleNamespace(sampling_params={"custom_params": {"other": 1}}),
    SimpleNamespace(sampling_params={"custom_params": {"intentkv": None}}),
], ids=lambda obj: repr(vars(obj)))  # fmt: skip
def test_requests_without_options_are_untouched(obj):
    before = repr(vars(obj))
    params = getattr(obj, "sampling_params", None)
    validate_request(None, obj, [1, 2], extra=True)
    assert repr(vars(obj)) == before
    assert getattr(obj, "sampling_params", None) is params


@pytest.fixture
def application(monkeypatch):
    """SGLang's application, with our route taken off again afterwards."""
    from sglang.srt.entrypoints import http_server

    kept = list(http_server.app.router.routes)
    yield http_server.app
    http_server.app.router.routes[:] = kept


class Manager:
    """SGLang's tokenizer manager as far as the control channel goes."""

    def __init__(self, reply):
        self.reply, self.asked = reply, []

    async def dumper_control(self, command):
        self.asked.append((command.method, command.body))
        return [self.reply]


def test_status_route(application):
    """It asks the scheduler over SGLang's own channel, and only exists where the plugin is selected."""
    from fastapi import HTTPException

    def routes():
        return [r for r in application.router.routes if getattr(r, "path", None) == "/intentkv/status"]

    add_routes(SimpleNamespace(radix_cache_backend=None), None)
    assert routes() == []
    manager = Manager(SimpleNamespace(success=True, response=[{"method": "full"}], error=""))
    add_routes(SimpleNamespace(radix_cache_backend="intentkv"), manager)
    (route,) = routes()
    assert route.methods == {"GET"}
    assert asyncio.run(route.endpoint(session="x")) == {"method": "full"}
    assert manager.asked == [("intentkv:status", {"session": "x"})]
    manager.reply = SimpleNamespace(success=False, response=[], error="no")
    with pytest.raises(HTTPException) as caught:
        asyncio.run(route.endpoint(session=None))
    assert caught.value.status_code == 500


def test_dashboard_routes(application, monkeypatch):
    """The page asks for no address but its own server's; without plotly one sentence says what to install."""
    add_routes(SimpleNamespace(radix_cache_backend="intentkv"), Manager(None))
    found = {r.path: r for r in application.router.routes if getattr(r, "path", "").startswith("/intentkv/")}
    page = found["/intentkv/dashboard"].endpoint()
    assert (page.status_code, page.media_type) == (200, "text/html")
    assert b"://" not in page.body
    script = found["/intentkv/plotly.js"].endpoint()
    assert b"plotly.js v" in script.body[:300]
    dashboard.plotly_js.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    missing = found["/intentkv/dashboard"].endpoint()
    assert missing.status_code == 503
    assert b"pip install plotly" in missing.body
    assert b"\n" not in missing.body
