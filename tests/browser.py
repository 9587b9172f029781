"""A real headless Chromium for pages, through playwright. Tests that need it are skipped, with the reason, where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium_page(**context: Any) -> Iterator[Any]:
    """A page in a fresh profile; at the end, nothing may have been written to its console as an error and no script may have failed.

    Opened and closed within one test: playwright's event loop is in the way of tests that run their own.

    Args:
        context: options of playwright's browser context, for example ``offline``.
    """
    executable = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    # A browser is no Python package, so the installation cannot bring it; everything but the pages is tested without one.
    if executable is None:
        pytest.skip(f"no Chromium here ({', '.join(_NAMES)} are not on the PATH); set CHROMIUM to one")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run: pip install playwright")
    complaints: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        page = browser.new_context(viewport={"width": 1280, "height": 900}, **context).new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        try:
            yield page
        finally:
            browser.close()
    assert not complaints
