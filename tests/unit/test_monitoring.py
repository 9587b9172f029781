"""The monitoring files in ``deploy/``: Prometheus takes them, its alerts fire when they should, the dashboard is drawn from queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.unit

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"


def promtool(*arguments: str | Path) -> str:
    tool = shutil.which("promtool")
    # A program of its own, not a Python package: the installation cannot bring it.
    if tool is None:
        pytest.skip("promtool is not installed (it comes with Prometheus)")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_its_configuration() -> None:
    """Catches a misspelt field or an expression that does not parse."""
    assert "5 rules found" in promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    text = ",".join(f'{label}="{value}"' for label, value in {"job": "intentkv", "instance": "one", **labels}.items())
    return {"series": f"{name}{{{text}}}", "values": values}


# Name of the alert, series that raise it, series that must not; one value a minute.
CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "IntentKVServerDown": ([series("up", "0x60")], [series("up", "1x60")]),
    "IntentKVPoolFull": (
        [series("sglang:kv_used_tokens", "96x60"), series("sglang:max_total_num_tokens", "100x60")],
        [series("sglang:kv_used_tokens", "94x60"), series("sglang:max_total_num_tokens", "100x60")],
    ),
    "IntentKVPrefixHitLow": (
        [series("intentkv_cached_tokens_total", "0+40x60"), series("intentkv_prompt_tokens_total", "0+100x60")],
        # no traffic is no bad hit rate
        [series("intentkv_cached_tokens_total", "0x60"), series("intentkv_prompt_tokens_total", "5x60")],
    ),
    "IntentKVEvictionsSlow": (
        [series("intentkv_prune_seconds_bucket", values, le=le) for le, values in [("0.5", "0x60"), ("1", "0+9x60"), ("+Inf", "0+9x60")]],
        [series("intentkv_prune_seconds_bucket", values, le=le) for le, values in [("0.05", "0+9x60"), ("+Inf", "0+9x60")]],
    ),
    "IntentKVEvictionsDeclined": (
        [series("intentkv_declined_prunes_total", "0+20x60", reason="r"), series("intentkv_prune_events_total", "0+1x60")],
        [series("intentkv_declined_prunes_total", "0+9x60", reason="r"), series("intentkv_prune_events_total", "0+1x60")],
    ),
}


def test_every_alert_has_a_case() -> None:
    """Catches an alert that nobody has tried."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(CASES)


@pytest.mark.parametrize("alert", CASES)
def test_alert_fires_and_stays_silent(alert: str, tmp_path: Path) -> None:
    """Catches an alert that never fires, or always: Prometheus itself evaluates it over made series."""
    bad, good = CASES[alert]
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    (rule,) = [rule for rule in group["rules"] if rule["alert"] == alert]
    # only that it fires is asked, so its texts are left out
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [{**rule, "annotations": {}}]}]}))
    labels = {"severity": rule["labels"]["severity"], "instance": "one"}
    if "by (instance" not in rule["expr"]:
        labels["job"] = "intentkv"
    cases = [(bad, [{"exp_labels": labels}]), (good, [])]
    tests = [
        {"interval": "1m", "input_series": given, "alert_rule_test": [{"eval_time": "50m", "alertname": alert, "exp_alerts": expected}]}
        for given, expected in cases
    ]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "intentkv.json").read_text())
    found: list[dict[str, Any]] = dashboard["panels"]
    return found


def test_panels_are_laid_out_and_named() -> None:
    """Catches panels that lie over each other, axes without a name and pictures without a unit."""
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["description"]
        assert defaults["unit"]
        assert panel["type"] == "stat" or defaults["custom"]["axisLabel"]
    assert len({panel["id"] for panel in panels()}) == len(panels())


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"][name]
    return found


def on_host(name: str, path: str) -> Path:
    """The file or folder of ``deploy/`` that a service sees as ``path``."""
    for volume in service(name)["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("./") and Path(path).is_relative_to(target):
            return DEPLOY / source / Path(path).relative_to(target)
    raise AssertionError(f"{name} does not mount {path}")


def flag(name: str, flag: str) -> str:
    (value,) = [argument.partition("=")[2] for argument in service(name)["command"] if argument.partition("=")[0] == flag]
    return str(value)


def provisioned(kind: str) -> dict[str, Any]:
    """The only entry of Grafana's provisioning files of that kind, found as its container finds them."""
    folder = on_host("grafana", service("grafana")["environment"]["GF_PATHS_PROVISIONING"]) / kind
    (file,) = folder.iterdir()
    (entry,) = yaml.safe_load(file.read_text())["providers" if kind == "dashboards" else kind]
    return dict(entry)


def test_containers_find_their_files() -> None:
    """Catches a mount or a variable that no longer leads to the files: Docker makes a missing folder anew, Grafana then shows nothing."""
    config = on_host("prometheus", flag("prometheus", "--config.file"))
    rules = [config.parent / name for name in yaml.safe_load(config.read_text())["rule_files"]]
    assert [file.resolve() for file in rules] == [ALERTS.resolve()]
    variable = provisioned("dashboards")["options"]["path"].removeprefix("$")
    folder = on_host("grafana", service("grafana")["environment"][variable])
    assert [file.name for file in folder.iterdir()] == ["intentkv.json"]
    # without containers the variable is the user's to set
    assert f'{variable}="$PWD/deploy/grafana/dashboards"' in (DEPLOY.parent / "docs" / "dashboards.md").read_text()


def test_grafana_asks_our_prometheus() -> None:
    """Catches panels bound to the data source of one Grafana, variables that nothing defines, and a Prometheus that listens elsewhere."""
    source = provisioned("datasources")
    assert source["url"].partition("//")[2].replace("localhost", "127.0.0.1") == flag("prometheus", "--web.listen-address")
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "intentkv.json").read_text())
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", source["type"])
    askers = [variables["instance"], *panels(), *(target for panel in panels() for target in panel["targets"])]
    assert all(asker["datasource"] == {"type": source["type"], "uid": "${datasource}"} for asker in askers)
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    # every query follows the choice of servers; the other variable is Grafana's own
    assert {frozenset(re.findall(r"\$(\w+)", query)) - {"__rate_interval"} for query in queries} == {frozenset({"instance"})}
