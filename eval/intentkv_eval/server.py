"""Start a server for an experiment and be sure that nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

_HOST = "127.0.0.1"
_POLL_S = 0.5
_TERM_GRACE_S = 15.0
_KILL_GRACE_S = 5.0
_TAIL_LINES = 30


class ServerError(RuntimeError):
    """The server died or did not become healthy in time; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Server:
    url: str
    pid: int
    """Leader of the server's process group."""
    log: Path


@contextlib.contextmanager
def running_server(arguments: list[str], log: Path, timeout_s: float = 600) -> Iterator[Server]:
    """``intentkv serve`` with ``arguments`` on a free local port, healthy on entry and gone on exit, whatever happens between.

    A plain ``kill`` of this process ends the server, too.

    Args:
        arguments: flags of ``intentkv serve``; host and port are added.
        log: file that receives the server's output; overwritten.
        timeout_s: seconds to wait for the first healthy answer.

    Raises:
        ServerError: it died or was not healthy in time.
    """
    port = _free_port()
    command = [sys.executable, "-m", "intentkv", "serve", *arguments, "--host", _HOST, "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with _sigterm_unwinds():
        with log.open("wb") as output:
            # its own session: the server's workers share one process group, and Ctrl-C reaches us first
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
            )
        server = Server(f"http://{_HOST}:{port}", process.pid, log)
        try:
            _wait_until_healthy(process, server, timeout_s)
            yield server
        finally:
            _end_process_group(process)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Inside, SIGTERM ends the process as Ctrl-C does, through its context managers. Signals are the main thread's: elsewhere nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # The server is several processes, each with a pool of one thread a core by default: they would fight for the cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    return environment


def _wait_until_healthy(process: subprocess.Popen[bytes], server: Server, timeout_s: float) -> None:
    console = Console(stderr=True)
    start = time.monotonic()
    with console.status("") as status, httpx.Client(base_url=server.url, timeout=30) as http:
        while (waited := time.monotonic() - start) < timeout_s:
            status.update(f"Starting a server on {server.url}: {waited:.0f} s, log in {server.log}")
            if process.poll() is not None:
                raise ServerError(f"The server exited with status {process.returncode} before it was healthy. {_tail(server.log)}")
            with contextlib.suppress(httpx.TransportError):  # refused until it listens; slow while it warms up
                if http.get("/health").status_code == httpx.codes.OK:
                    console.print(f"Server {server.url} is up after {waited:.0f} s, log in {server.log}", soft_wrap=True)
                    return
            time.sleep(_POLL_S)
    raise ServerError(f"The server was not healthy after {timeout_s:.0f} s. {_tail(server.log)}")


def _tail(log: Path) -> str:
    with log.open(errors="replace") as lines:
        tail = "".join(deque(lines, _TAIL_LINES)).rstrip()
    return f"End of {log}:\n{tail}" if tail else f"{log} is empty."


def _end_process_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the leader to stop, then kill whatever is left of its group. Bounded; by id, also when the leader is gone already."""
    try:
        # the leader alone: a worker that gets the signal first is taken for a crash, and the leader stays for its diagnostics
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_GRACE_S)
    finally:  # a second Ctrl-C cuts the wait short, not the end
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_KILL_GRACE_S)
