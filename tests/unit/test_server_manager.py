"""The server of an experiment: started, awaited, and gone afterwards whatever happened, with a stand-in for the real one."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest

from intentkv_eval import server as server_module
from intentkv_eval.server import Server, ServerError, running_server

pytestmark = pytest.mark.unit

STAND_IN = """\
#!{python}
import http.server, os, signal, subprocess, sys, time
mode, port = sys.argv[sys.argv.index("serve") + 1], int(sys.argv[sys.argv.index("--port") + 1])
print("arguments", *sys.argv[1:], flush=True)
print("threads", os.environ.get("OMP_NUM_THREADS"), flush=True)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", worker.pid, flush=True)
if mode == "dies":
    print("the reason", flush=True)
    sys.exit(7)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if mode == "sick" else 200)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the server's log; ``python -m intentkv serve`` is replaced by the stand-in."""
    script = tmp_path / "stand_in"
    script.write_text(textwrap.dedent(STAND_IN.format(python=sys.executable)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(server_module, "_TERM_GRACE_S", 2.0)
    return tmp_path / "logs" / "server.log"


def logged(log: Path, what: str) -> str:
    return next(line for line in log.read_text().splitlines() if line.startswith(what)).removeprefix(what).strip()


def gone(pid: int) -> bool:
    """Whether a process ended, also one that nobody has reaped yet. Waits a moment: a killed orphan is reaped by init."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def assert_nothing_is_left(log: Path, leader: int) -> None:
    assert gone(leader)
    assert gone(int(logged(log, "worker")))


@pytest.mark.parametrize("mode", ["good", "stubborn"])
def test_healthy_server_is_yielded_and_its_whole_group_is_gone_after(log: Path, mode: str) -> None:
    """Catches workers that outlive the server, and a server that ignores a polite signal."""
    with running_server([mode, "--flag"], log, timeout_s=60) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
    assert logged(log, "arguments").startswith(f"-m intentkv serve {mode} --flag --host 127.0.0.1 --port ")
    assert_nothing_is_left(log, server.pid)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_server_is_gone_after_a_failure_inside(log: Path, error: type[BaseException]) -> None:
    """Catches a server that survives an interrupted or failed experiment and holds the machine."""
    servers: list[Server] = []

    def experiment() -> None:
        with running_server(["good"], log, timeout_s=60) as server:
            servers.append(server)
            raise error

    with pytest.raises(error):
        experiment()
    assert_nothing_is_left(log, servers[0].pid)


def test_server_is_gone_after_a_kill_of_the_experiment(log: Path) -> None:
    """Catches a server that outlives a benchmark ended by ``kill`` or by a job's time limit, and a handler that stays behind."""
    before = signal.getsignal(signal.SIGTERM)
    servers: list[Server] = []

    def experiment() -> None:
        with running_server(["good"], log, timeout_s=60) as server:
            servers.append(server)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(SystemExit) as ended:
        experiment()
    assert ended.value.code == 128 + signal.SIGTERM
    assert_nothing_is_left(log, servers[0].pid)
    assert signal.getsignal(signal.SIGTERM) is before


def test_interrupt_while_waiting_ends_the_server(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Ctrl-C during a long start that leaves the server behind."""

    def interrupted(process: object, server: Server, timeout_s: float) -> None:
        while "worker" not in log.read_text():
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(server_module, "_wait_until_healthy", interrupted)
    with pytest.raises(KeyboardInterrupt), running_server(["good"], log):
        pytest.fail("yielded a server that was not awaited")
    assert gone(int(logged(log, "worker")))


def test_dead_server_is_reported_with_its_log(log: Path) -> None:
    """Catches waiting out the whole time for a server that is dead, and an error that hides why; its workers go, too."""
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"(?s)status 7 .*the reason"), running_server(["dies"], log, timeout_s=600):
        pytest.fail("yielded a dead server")
    assert time.monotonic() - start < 300
    assert gone(int(logged(log, "worker")))


def test_server_that_never_gets_healthy_is_given_up(log: Path) -> None:
    """Catches an endless wait."""
    with pytest.raises(ServerError, match=r"(?s)not healthy after 2 s.*worker"), running_server(["sick"], log, timeout_s=2):
        pytest.fail("yielded a sick server")
    assert gone(int(logged(log, "worker")))


@pytest.mark.parametrize("given", [None, "5"])
def test_thread_count_is_set_only_where_it_is_not(log: Path, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """Catches an override of what the user set, and a server whose processes each take all cores."""
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    with running_server(["good"], log, timeout_s=60):
        threads = logged(log, "threads")
    assert threads == given if given else 1 <= int(threads) <= max(1, (os.cpu_count() or 2) // 2)
