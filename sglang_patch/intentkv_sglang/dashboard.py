"""The live page ``GET /intentkv/dashboard``: pictures of ``/intentkv/status``, drawn in the browser by the plotly installed here."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

PLOTLY_MISSING = "The dashboard needs plotly, which is not installed beside the server; run: pip install plotly."


def page() -> str:
    """The page as HTML; it fetches only ``status`` and ``plotly.js`` of the same server."""
    return resources.files("intentkv_sglang").joinpath("dashboard_page.html").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def plotly_js() -> str:
    """plotly's own JavaScript, some MB.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text
