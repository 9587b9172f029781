"""What the benchmarks share around their measurements: arms, the servers behind them, where a result comes from."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import typer
from pydantic import BaseModel
from tqdm import tqdm
from typer.core import TyperCommand

from intentkv.cli import OneLineErrors
from intentkv.config import ConfigError, RequestOptions
from intentkv_eval.client import RequestFailed, ServerClient, connect
from intentkv_eval.provenance import Provenance, collect
from intentkv_eval.replay import request_options
from intentkv_eval.server import ServerError, running_server

Kind = Literal["stock", "plugin"]

_IDLE_S = 60.0
_POLL_S = 0.2
_ERRORS = re.compile(r"\b(?:ERROR|CRITICAL|Traceback|[A-Z]\w*Error\b|[A-Z]\w*Exception\b)")
_ERRORS_SHOWN = 20

ModelOption = Annotated[str, typer.Option("--model", help="Model folder or Hugging Face id.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for the results and the servers' logs.")]
ArmsOption = Annotated[list[str], typer.Option("--arm", help="stock, METHOD or METHOD:BUDGET; may be given again.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the prompts' content.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds a server may be silent during a request.")]
StartTimeoutOption = Annotated[float, typer.Option("--start-timeout", min=1, help="Seconds a server may take to start.")]
StockUrlOption = Annotated[str | None, typer.Option("--url-stock", help="A stock server that runs already.")]
PluginUrlOption = Annotated[str | None, typer.Option("--url-plugin", help="A server with the plugin that runs already.")]
StockLogOption = Annotated[Path | None, typer.Option("--log-stock", help="Log of the server behind --url-stock.")]
PluginLogOption = Annotated[Path | None, typer.Option("--log-plugin", help="Log of the server behind --url-plugin.")]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer settings of a command whose unknown flags go to the servers."""


class Command(OneLineErrors, TyperCommand):
    """A benchmark's command: a user's mistake is one line and exit status 2."""


class Arm(NamedTuple):
    """What is compared: a server kind and the options every request carries."""

    name: str
    kind: Kind
    request: RequestOptions


def parse_arm(text: str) -> Arm:
    """``stock``, ``METHOD`` or ``METHOD:BUDGET``.

    Raises:
        ConfigError: no such method, or a budget that is not a positive number.
    """
    if text == "stock":
        return Arm(text, "stock", RequestOptions())
    method, colon, budget = text.partition(":")
    if colon and not budget.isdecimal():
        raise ConfigError(f"Arm {text!r} has no number behind its colon; write for example assistant:8192.")
    return Arm(text, "plugin", request_options(method=method, budget=int(budget) if budget else None))


class Endpoint(NamedTuple):
    """A server that runs."""

    url: str
    log: Path | None
    """None: not known, and then not looked at."""


class Existing(NamedTuple):
    """Servers that a user has running already; those that are None are started."""

    stock: Endpoint | None = None
    plugin: Endpoint | None = None


class Servers(NamedTuple):
    """The servers of one benchmark: how they are started, or which run already."""

    model: str
    arguments: Sequence[str]
    """Flags that all of them get."""
    out: Path
    """Folder of their logs."""
    start_timeout_s: float
    existing: Existing

    @contextmanager
    def serve(self, kind: Kind, label: str = "", method: str = "assistant", flags: Sequence[str] = ()) -> Iterator[Endpoint]:
        """The server of ``kind``: the one that runs, else a fresh one for the time of the context.

        One server does for all plugin arms, since requests choose their method; but queries of the decode pass are captured only where
        the server's own ``method`` wants them, so by default it is one that does.

        Raises:
            ConfigError: servers that run were given, and none of this kind.
            ServerError: it did not start.
        """
        given: Endpoint | None = getattr(self.existing, kind)
        if given is not None:
            yield given
            return
        if any(self.existing):
            raise ConfigError(f"An arm needs a {kind} server; give --url-{kind}, too, or no server at all.")
        own = ["--stock"] if kind == "stock" else ["--method", method]
        arguments = ["--model", self.model, *own, *flags, *self.arguments]
        with running_server(arguments, self.out / f"{kind}{label}.log", self.start_timeout_s) as server:
            yield Endpoint(server.url, server.log)


def existing_servers(url_stock: str | None, log_stock: Path | None, url_plugin: str | None, log_plugin: Path | None) -> Existing:
    """What the four options say."""
    return Existing(
        Endpoint(url_stock, log_stock) if url_stock else None,
        Endpoint(url_plugin, log_plugin) if url_plugin else None,
    )


class Connection(NamedTuple):
    """Two clients of one server."""

    client: ServerClient
    http: httpx.AsyncClient
    """For what ``client`` has no name for; as many connections as asked for, so that counters are read at once."""


@asynccontextmanager
async def connection(url: str, timeout_s: float, concurrency: int) -> AsyncIterator[Connection]:
    """Clients of the server at ``url``.

    Raises:
        ConfigError: no server answers there.
    """
    unlimited = httpx.Limits(max_connections=None)
    async with (
        connect(url, timeout_s, concurrency) as client,
        httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=unlimited) as http,
    ):
        yield Connection(client, http)


async def flush_when_idle(client: ServerClient, patience_s: float = _IDLE_S) -> None:
    """Empty the prefix cache once the requests that were given up are gone.

    Raises:
        RequestFailed: the server is still busy after ``patience_s`` seconds.
    """
    end = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            return await client.flush_cache()
        except RequestFailed:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(_POLL_S)


class Origin(BaseModel):
    """Where a result comes from."""

    device: str
    servers: dict[str, Provenance] = {}
    """By kind, or by kind and pool where several ran."""
    seed: int
    data_sha256: str | None = None
    """Of the recorded sessions whose lengths are used."""


def device_name() -> str:
    """The accelerator's name as its driver says it, or the processor's."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return platform.processor() or platform.machine()
    return ", ".join(filter(None, names))


async def server_provenance(url: str, timeout_s: float) -> Provenance:
    """Versions and arguments of the server at ``url``.

    Raises:
        ConfigError: it does not answer.
    """
    try:
        async with connect(url, timeout_s) as client:
            return await collect(client)
    except RequestFailed as error:
        raise ConfigError(f"The server at {url} cannot be measured: {error}.") from error


def log_size(log: Path | None) -> int:
    """Bytes in ``log``: where to read on later."""
    with contextlib.suppress(OSError):
        return log.stat().st_size if log is not None else 0
    return 0


@contextmanager
def one_line_server_errors() -> Iterator[None]:
    """A server that does not start becomes one line on stderr and exit status 1."""
    try:
        yield
    except ServerError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def error_lines(log: Path | None, start: int = 0) -> list[str] | None:
    """The first lines that look like errors behind byte ``start``; None when there is no log to look at."""
    if log is None or not log.is_file():
        return None
    with log.open("rb") as file:
        file.seek(start)
        lines = (line.decode(errors="replace").rstrip() for line in file)
        return [line for line in lines if _ERRORS.search(line)][:_ERRORS_SHOWN]


def page(figure: Any) -> str:
    """A plotly figure as one HTML page that works offline."""
    text: str = figure.to_html(include_plotlyjs=True, config={"displaylogo": False, "responsive": True})
    return text


def write_picture(result_file: Path, picture: Callable[[], str]) -> None:
    """Write what ``picture`` draws beside ``result_file``; a note where plotly is missing, as on a bare GPU machine."""
    try:
        result_file.with_suffix(".html").write_text(picture(), encoding="utf-8")
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        tqdm.write(f"No picture: plotly is not installed; draw it later with: python -m intentkv_eval.bench_pictures {result_file}")


def new_folder(out: Path, result: str) -> Path:
    """``out``, made; the place of ``result`` in it.

    Raises:
        ConfigError: results are there already.
    """
    if (out / result).exists():
        raise ConfigError(f"Folder {str(out)!r} holds results already; give another --out.")
    out.mkdir(parents=True, exist_ok=True)
    return out / result
