"""What the server says about itself: metrics that agree with the requests sent, and control routes behind the server's own API key."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from intentkv.metrics import METRICS

from .harness import Chat, Client


def scrape(server: Client) -> dict[str, float]:
    """Value of every unlabelled sample and of every sample's name with its labels' values, as in ``name/value``."""
    samples = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            own = [value for label, value in sorted(sample.labels.items()) if label != "pid"]
            samples["/".join([sample.name, *own])] = sample.value
    return samples


def test_every_metric_is_exposed(served: Client, new_chat: Callable[[], Chat]) -> None:
    # A budget below the forced keep: the one counter with a label shows once there is a reason.
    prompt = new_chat().say("system", 20).say("user", 60).say("assistant", 20).say("user", 30).ask()
    served.generate(prompt, 2, {"budget": 10, "hysteresis": 0})
    served.check_idle()
    names = {name.split("/")[0] for name in scrape(served)}
    for spec in METRICS:
        shown = {f"{spec.name}_{part}" for part in ("bucket", "sum", "count")} if spec.kind == "histogram" else {spec.name}
        assert shown <= names, spec.name


def test_counters_equal_the_requests_sent(served: Client, new_chat: Callable[[], Chat]) -> None:
    """Sums over the answers equal the counters, in ``/metrics`` and in ``/intentkv/status``; gauges equal the pool."""
    served.check_idle()
    before, status_before = scrape(served), served.status()["counters"]
    answers = []
    for number in range(2):
        chat = new_chat().say("system", 20)
        for role, size in [("user", 60), ("tool", 90), ("tool", 70)]:
            options = {"budget": 120, "hysteresis": 0}
            answers.append(served.generate(chat.say(role, size).ask(), 10, options, session_id=f"counted-{number}"))
            chat.answered(answers[-1].output_ids)
    status = served.idle_status()
    after = scrape(served)
    sums = {
        "prompt_tokens": sum(a.meta["prompt_tokens"] for a in answers),
        "cached_tokens": sum(a.cached_tokens for a in answers),
        "live_cached_tokens": sum(a.figures["live_cached_tokens"] for a in answers),
        "pruned_tokens": sum(a.figures["pruned_tokens"] for a in answers),
        "freed_slots": sum(a.figures["pruned_tokens"] for a in answers),
        "prune_events": sum(a.figures["pruned_tokens"] > 0 for a in answers),
    }
    assert sums["prune_events"] >= 4
    for name, total in sums.items():
        assert status["counters"][name] - status_before[name] == total, name
        assert after[f"intentkv_{name}_total"] - before.get(f"intentkv_{name}_total", 0) == total, name
    count = "intentkv_prune_seconds_count"
    assert after[count] - before.get(count, 0) == sums["prune_events"]
    pool = status["pool"]
    assert after["intentkv_tree_live_tokens"] == pool["evictable"] == pool["total"] - pool["available"]
    assert after["intentkv_tree_dead_tokens"] == pool["dead"] == sum(a.figures["pruned_tokens"] for a in answers)
    assert after["intentkv_tree_logical_tokens"] == pool["evictable"] + pool["dead"]
    assert after["intentkv_sessions"] == status["sessions"]["count"]


def test_live_cached_tokens(served: Client, new_chat: Callable[[], Chat]) -> None:
    """Of a pruned prefix every position counts as cached, and only the live ones as live."""
    chat = new_chat().say("system", 20).say("user", 60).say("assistant", 20).say("user", 30)
    answer = served.generate(chat.ask(), 10, {"budget": 70, "hysteresis": 0}, session_id="live")
    dead = served.dead("live")
    following = chat.answered(answer.output_ids).say("user", 10).ask()
    again = served.generate(following, 1, {"method": "full"}, session_id="live")
    assert again.figures["live_cached_tokens"] == again.cached_tokens - len(dead) < again.cached_tokens


def test_streamed_figures(served: Client, new_chat: Callable[[], Chat]) -> None:
    """A stream carries one set of figures, in its last chunk."""
    prompt = new_chat().say("system", 20).say("user", 60).say("assistant", 20).say("user", 30).ask()
    body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
    text = served.post("/generate", body).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    figures = [chunk["meta_info"].get("intentkv", []) for chunk in chunks]
    assert figures[:-1] == [[]] * (len(chunks) - 1)
    (last,) = figures[-1]
    assert last["logical_tokens"] == len(prompt) + 6


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}], ids=["no key", "wrong key"])
def test_control_routes_need_the_api_key(tight: Client, header: dict[str, str]) -> None:
    path = tight.http.base_url.join("/intentkv/status")
    assert httpx.get(path, headers=header).status_code == httpx.codes.UNAUTHORIZED
    assert tight.http.get(path).status_code == httpx.codes.OK
