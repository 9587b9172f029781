"""The monitoring files in ``deploy/``: Prometheus takes them, its alerts fire when they should, the dashboard is drawn from queries."""

from __future__ import annotations

import json
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


def test_compose_mounts_what_is_there() -> None:
    """Catches a volume of a folder that was moved, which Docker makes anew and empty."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = [volume.split(":")[0] for service in services.values() for volume in service["volumes"] if volume.startswith("./")]
    assert mounts == ["./prometheus", "./grafana"]
    assert (DEPLOY / "prometheus" / "prometheus.yml").is_file()
    assert (DEPLOY / "grafana" / "provisioning" / "dashboards").is_dir()
