"""Where a result comes from: what every result file records besides its numbers."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from intentkv import __version__
from intentkv_eval.client import ServerClient

# A server's own description holds its API key too, so only what bears on a measurement is taken.
_SERVER_FIELDS = (
    "attention_backend",
    "chunked_prefill_size",
    "context_length",
    "device",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "dtype",
    "kv_cache_dtype",
    "max_running_requests",
    "max_total_num_tokens",
    "model_path",
    "page_size",
    "radix_cache_backend",
    "random_seed",
    "schedule_policy",
    "tp_size",
)


class Provenance(BaseModel):
    command: list[str]
    started: str
    """UTC, ISO 8601."""
    git_commit: str | None
    """Commit of the checkout the evaluation ran from, with ``-dirty`` when it was changed."""
    python: str
    platform: str
    versions: dict[str, str]
    """Of the server (intentkv, sglang, torch), and ``client`` for this package."""
    server: dict[str, Any]
    """The server's arguments that bear on a measurement."""
    method: str | None = None
    """Of the server; None for a stock one."""
    budget: int | None = None


async def collect(client: ServerClient) -> Provenance:
    """Describe this process, its checkout and the server.

    Raises:
        RequestFailed: the server answers with an error.
    """
    info = await client.server_info()
    status = await client.status()
    versions = {"client": __version__}
    if info.get("version"):
        versions["sglang"] = str(info["version"])
    versions.update((status or {}).get("versions", {}))
    return Provenance(
        command=sys.argv,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        git_commit=_git_commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        versions=versions,
        server={name: info[name] for name in _SERVER_FIELDS if name in info},
        method=(status or {}).get("method"),
        budget=(status or {}).get("budget"),
    )


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
