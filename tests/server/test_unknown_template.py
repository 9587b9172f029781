"""A tokenizer with the markers of no known chat template: one warning, and the newest uncached part stands in for the newest message."""

from __future__ import annotations

from collections.abc import Callable

from .harness import Chat, Client
from .oracle import SINKS, DenseModel, check_greedy

WARNING = "markers of no known chat template"


def test_works_and_warns_once(plain: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    words = new_chat().words
    prompt = words(60)
    options = {"method": "streamingllm", "budget": 50, "hysteresis": 0}
    dead: set[int] = set()
    for turn in range(3):
        answer = plain.generate(prompt, 8, options, session_id="no-roles")
        cached, n = answer.cached_tokens, len(prompt)
        forced = set(range(SINKS["streamingllm"])) | set(range(cached, n))
        history = [j for j in range(n) if j not in forced | dead]
        keep = max(0, 50 - len(forced))
        dead |= set(history[: max(0, len(history) - keep)])
        assert plain.dead("no-roles") == dead
        if turn == 0:
            assert not dead, "all of the first prompt is new"
            check_greedy(dense, prompt, answer.output_ids)
        prompt += answer.output_ids + words(20)
    assert len(dead) > 40
    assert plain.log.read_text(errors="replace").count(WARNING) == 1


def test_known_template_does_not_warn(served: Client) -> None:
    assert WARNING not in served.log.read_text(errors="replace")
