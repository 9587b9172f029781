"""Known chat templates: the markers that delimit messages, and how to write a message with them.

To support another format, add a :class:`Template` to ``TEMPLATES``. It fits when every message reads ``start name header_end content end``
with ``start`` and ``end`` single tokens of the vocabulary; :class:`intentkv.spans.PromptParser` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["system", "user", "tool", "assistant", "unknown"]

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}
"""Names that clients and templates use, and the role they mean."""


@dataclass(frozen=True)
class Template:
    """One chat format. A message reads ``start name header_end content end separator``."""

    name: str
    start: str
    """Opens a message; a single token."""
    header_end: str
    end: str
    """Closes a message; a single token."""
    separator: str = ""
    """Between two messages."""
    bos: str = ""
    """In front of the first message."""
    other_ends: tuple[str, ...] = ()
    """Further single tokens that close a message."""
    requires: tuple[str, ...] = ()
    """Further single tokens by which the template is told from one with the same markers."""
    tool_name: str = "tool"
    """Name in the header of a tool result."""
    tool_body: str = "{}"
    """What wraps a tool result's content, in :meth:`str.format` syntax."""
    user_tool_opening: str = ""
    """A user message whose content starts with this is a tool result."""
    reasoning_openings: tuple[str, ...] = ()
    """What the format may write behind the header of a generation prompt, to open or to skip the model's reasoning."""

    def render(self, role: str, content: str) -> str:
        """One message as text, markers and separator included.

        Args:
            role: an API role; ``developer`` is written as the system role, ``function`` and ``ipython`` as the format's tool role,
                and a name that is none of the known ones as it is.
        """
        meaning = _ROLES.get(role)
        if meaning == "tool":
            return self._message(self.tool_name, self.tool_body.format(content))
        return self._message(meaning or role, content)

    def generation_prompt(self) -> str:
        """The opened, empty assistant message that asks the model to speak."""
        return f"{self.start}assistant{self.header_end}"

    def generation_prompts(self) -> list[str]:
        """Every generation prompt of the format, those that open or skip reasoning included."""
        return [self.generation_prompt() + opening for opening in ("", *self.reasoning_openings)]

    def headers(self) -> dict[str, Role]:
        """What can follow ``start``, up to the content, and the role of the message it opens."""
        headers = {name + self.header_end: role for name, role in _ROLES.items()}
        if self.user_tool_opening:
            headers[f"user{self.header_end}{self.user_tool_opening}"] = "tool"
        return headers

    def _message(self, name: str, body: str) -> str:
        return f"{self.start}{name}{self.header_end}{body}{self.end}{self.separator}"


_CHATML = Template(
    name="chatml",
    start="<|im_start|>",
    header_end="\n",
    end="<|im_end|>",
    separator="\n",
    user_tool_opening="<tool_response>",
    reasoning_openings=("<think>\n", "<think>\n\n</think>\n\n"),
)

TEMPLATES: Mapping[str, Template] = {
    template.name: template
    for template in (
        replace(
            _CHATML,
            name="qwen",
            requires=("<tool_call>",),
            tool_name="user",
            tool_body="<tool_response>\n{}\n</tool_response>",
        ),
        _CHATML,
        Template(
            name="llama-3",
            start="<|start_header_id|>",
            header_end="<|end_header_id|>\n\n",
            end="<|eot_id|>",
            bos="<|begin_of_text|>",
            other_ends=("<|eom_id|>",),
            tool_name="ipython",
        ),
    )
}
"""By name; the first whose single tokens are all in a vocabulary is the one."""
