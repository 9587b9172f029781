"""Mean query of every actionable span (IntentKV, section 3: Enc(q_t))."""

from __future__ import annotations

from dataclasses import dataclass

from intentkv.protocols import CaptureRequest
from intentkv.spans import Prompt


@dataclass(frozen=True)
class ActionableMeans:
    """One averaged query per user, tool or function message, in order: a prompt with several new turns updates the memory turn by turn."""

    decode: bool = False
    decode_limit: int = 0

    def requests(self, prompt: Prompt) -> list[CaptureRequest]:
        return [CaptureRequest(span, "mean") for span in prompt.of_role("user", "tool", "unknown")]
