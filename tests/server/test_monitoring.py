"""Every query of the Grafana dashboard and of the alerts, against the metrics of a real server, and against a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from .harness import PATIENCE_S, Chat, Client, generate_body

DEPLOY = Path(__file__).parents[2] / "deploy"

KEYWORDS = {"by", "without", "and", "or", "unless", "on", "ignoring", "bool", "offset"}


def dashboard_queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "intentkv.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def alert_queries() -> list[str]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def metric_names(query: str) -> set[str]:
    """Names in a PromQL expression: what is left without label matchers, ranges, groupings, functions and keywords."""
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", query)
    names = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\w|\s*\()", text)
    return set(names) - KEYWORDS


def test_names_are_found_in_queries() -> None:
    """The test's own reader of PromQL."""
    query = 'histogram_quantile(0.9, sum by (le) (rate(a:b_bucket{x="y"}[5m]))) / ignoring(le) (c > bool 0) or d'
    assert metric_names(query) == {"a:b_bucket", "c", "d"}


def traffic(served: Client, chat: Chat) -> None:
    """A session that is pruned, one prune that is declined, and a stream: some metrics show once there is something to count."""
    for role, size in [("system", 20), ("user", 60), ("tool", 90), ("tool", 70)]:
        answer = served.generate(chat.say(role, size).ask(), 10, {"budget": 120, "hysteresis": 0}, session_id=chat.seed)
        chat.answered(answer.output_ids)
    served.generate(chat.say("user", 90).ask(), 2, {"budget": 1, "hysteresis": 0}, session_id=chat.seed)
    assert served.post("/generate", generate_body(chat.ids, 10, stream=True)).is_success
    served.check_idle()


def test_every_query_names_a_metric_that_exists(served: Client, new_chat: Callable[[], Chat]) -> None:
    """Catches a metric that was renamed, or that SGLang names otherwise: such a panel is empty and says nothing."""
    traffic(served, new_chat())
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    exposed = {sample.name for family in families for sample in family.samples} | {"up"}  # `up` is Prometheus' own
    for query in [*dashboard_queries(), *alert_queries()]:
        names = metric_names(query)
        assert names, query
        assert names <= exposed, query


@pytest.fixture
def prometheus(served: Client, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus with our configuration, but for the server's address and a shorter interval."""
    binary = shutil.which("prometheus")
    # A program of its own, not a Python package. That every query names a metric that exists is tested without it, above.
    if binary is None:
        pytest.skip("prometheus is not installed")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"{served.http.base_url.host}:{served.http.base_url.port}"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}"]
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen([binary, *flags], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def ask(prometheus: httpx.Client, query: str) -> list[Any]:
    reply = prometheus.get("/api/v1/query", params={"query": query})
    assert reply.status_code == httpx.codes.OK, f"{query}: {reply.text}"
    result: list[Any] = reply.json()["data"]["result"]
    return result


def test_every_panel_shows_something(prometheus: httpx.Client, served: Client, new_chat: Callable[[], Chat]) -> None:
    """Catches queries that parse, name real metrics and still join nothing: a wrong label, a quantile without its ``le``."""
    queries = [query.replace("$instance", ".+").replace("$__rate_interval", "1m") for query in dashboard_queries()]
    deadline = time.monotonic() + PATIENCE_S
    empty = queries
    while empty and time.monotonic() < deadline:
        traffic(served, new_chat())
        time.sleep(1.5)
        try:
            empty = [query for query in empty if not any(sample["value"][1] != "NaN" for sample in ask(prometheus, query))]
        except httpx.TransportError:  # it is still starting
            continue
    assert not empty
    assert ask(prometheus, 'up{job="intentkv"} == 0') == []
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert [rule["health"] for group in groups for rule in group["rules"]] == ["ok"] * len(alert_queries())
