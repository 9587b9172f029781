"""The ``intentkv`` command. Each subcommand loads the package that implements it only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from intentkv import __version__
from intentkv.config import Config, ConfigError, load_config
from intentkv.methods import method_info, method_names

# Newer typer carries its own copy of click: the class both export is the way to the base of all usage errors.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class OneLineErrors:
    """Mixed into a typer command or group: the one place where a user's mistake becomes one line on stderr and exit status 2.

    A command may return its exit status.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            status = super().main(*args, **kwargs)  # type: ignore[misc]
        except ConfigError as error:
            status = _fail(str(error))
        except _UsageError as error:
            command = error.ctx.command_path if error.ctx else "intentkv"
            status = _fail(f"{error.format_message().rstrip('.')} (see '{command} --help').")
        except typer.Abort:
            status = 1
        sys.exit(status or 0)


class _Commands(OneLineErrors, TyperGroup):
    pass


def _fail(message: str) -> int:
    typer.echo(f"Error: {' '.join(message.split())}", err=True)
    return 2


_SERVER = "install SGLang and run: pip install 'intentkv[server]'"
_EVAL = "run: pip install 'intentkv[eval]'"
_TRAIN = "run: pip install 'intentkv[train]'"


@contextmanager
def _room(module: str, remedy: str) -> Iterator[Any]:
    """The module that implements a command.

    Raises:
        ConfigError: a package it needs is not installed, found when it is imported or when it is used.
    """
    try:
        yield import_module(module)
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.startswith("intentkv") and "." in name:  # a module of ours that does not exist is our fault, not the installation's
            raise
        raise ConfigError(f"This command needs {name!r}, which is not installed; {remedy}.") from error


app = typer.Typer(
    cls=_Commands,
    help="Evict the KV cache of multi-turn agents on SGLang while the prefix cache keeps hitting.",
    pretty_exceptions_enable=False,
    add_completion=False,
)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"intentkv {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_Model = Annotated[str | None, typer.Option(help="Model folder or Hugging Face id (SGLang's --model-path).")]
_Method = Annotated[str | None, typer.Option(help="Which tokens stay; `intentkv methods` lists them.")]
_Budget = Annotated[int | None, typer.Option(help="Tokens a request keeps resident.")]
_ConfigFile = Annotated[Path | None, typer.Option(help="TOML or JSON file with these and all other options.")]
_Head = Annotated[
    Path | None,
    typer.Option(help="Folder of a trained head, for the learned methods; default: the packaged one, for the default model."),
]
_Record = Annotated[Path | None, typer.Option(help="Log every request into this folder (messages, token ids, figures).")]
_RecordLimit = Annotated[int | None, typer.Option(help="Size of all logs together, in MB; the oldest are deleted.")]


def _settings(
    model: str | None,
    method: str | None,
    budget: int | None,
    config: Path | None,
    head: Path | None,
    record: Path | None,
    record_limit_mb: int | None,
) -> Config:
    """The configuration that the flags of ``intentkv serve`` give."""
    if head is None and model is None and method is not None:
        from intentkv.head import packaged_head

        head = packaged_head(method)
    return load_config(config, method=method, budget=budget, head=head, record=record, record_limit_mb=record_limit_mb)


@app.command(context_settings=_PASS_ON)
def serve(
    context: typer.Context,
    model: _Model = None,
    method: _Method = None,
    budget: _Budget = None,
    config: _ConfigFile = None,
    head: _Head = None,
    record: _Record = None,
    record_limit_mb: _RecordLimit = None,
    stock: Annotated[bool, typer.Option("--stock/--no-stock", help="The same server without the plugin, to compare with.")] = False,
) -> int:
    """Start an SGLang server that evicts KV tokens and keeps prefix hits.

    Every other flag goes to SGLang as it is, for example: intentkv serve --model DIR --budget 8192 --port 30000 --tp-size 2
    """
    return _serve(context, model, _settings(model, method, budget, config, head, record, record_limit_mb), stock)


def _serve(context: typer.Context, model: str | None, settings: Config, stock: bool) -> int:
    with _room("intentkv_sglang.launcher", _SERVER) as launcher:
        status: int = launcher.serve(model, settings, stock, list(context.args))
    return status


@app.command(context_settings=_PASS_ON)
def record(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the logs; made when missing, readable by you alone.")],
    model: _Model = None,
    limit_mb: _RecordLimit = None,
    config: _ConfigFile = None,
) -> int:
    """Serve and log every request, for training: messages, token ids, tool calls and figures; never headers or keys.

    Same as `intentkv serve --record DIR`, with nothing evicted unless the configuration file names a method. Other flags go to SGLang.
    """
    settings = load_config(config, method=None if config else "full", record=folder, record_limit_mb=limit_mb)
    return _serve(context, model, settings, stock=False)


@app.command(context_settings=_PASS_ON | {"help_option_names": []}, add_help_option=False)
def train(context: typer.Context) -> int:
    """Make examples from logs, train a head, evaluate it: `intentkv train --help` lists the steps."""
    with _room("intentkv_training.cli", _TRAIN) as room:
        status: int = room.main(list(context.args))
    return status


@app.command(context_settings=_PASS_ON)
def doctor(
    context: typer.Context,
    model: _Model = None,
    method: _Method = None,
    budget: _Budget = None,
    config: _ConfigFile = None,
    head: _Head = None,
    record: _Record = None,
    record_limit_mb: _RecordLimit = None,
) -> int:
    """Check that this machine can serve: versions, hooks, device, guards. Takes the flags you mean to serve with, SGLang's too."""
    _settings(model, method, budget, config, head, record, record_limit_mb)
    with _room("intentkv_sglang.doctor", _SERVER) as room:
        status: int = room.run(list(context.args))
    return status


@app.command()
def methods() -> None:
    """List the methods, what each keeps and where it comes from."""
    width = max(map(len, method_names()))
    for name in method_names():
        info = method_info(name)
        typer.echo(f"{name:<{width}}  {info.summary} [{info.source}]")


@app.command()
def replay(
    files: Annotated[list[Path], typer.Option("--input", help="Recorded agents, JSONL, one trajectory a line; may be given again.")],
    out: Annotated[Path, typer.Option(help="Folder for turns.jsonl and summary.json.")],
    url: Annotated[str, typer.Option(help="The running server.")] = "http://127.0.0.1:30000",
    arm: Annotated[str | None, typer.Option(help="Name of this run in reports; default: the server's method and budget.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many trajectories.")] = None,
    max_context: Annotated[int, typer.Option(min=1, help="Cut a trajectory before it grows past this many tokens.")] = 8000,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most this many generated tokens a turn.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Trajectories replayed at a time.")] = 1,
    session_ids: Annotated[bool, typer.Option("--session-ids/--no-session-ids", help="Send each trajectory's id as session_id.")] = True,
    method: Annotated[str | None, typer.Option(help="Method of every request, instead of the server's.")] = None,
    budget: Annotated[int | None, typer.Option(help="Budget of every request, in tokens.")] = None,
    budget_ratio: Annotated[float | None, typer.Option(help="Share of the history to keep, instead of a budget.")] = None,
    hysteresis: Annotated[int | None, typer.Option(help="Tokens over the target before an eviction.")] = None,
    flush: Annotated[bool, typer.Option("--flush/--no-flush", help="Empty the server's prefix cache first.")] = True,
    template: Annotated[str | None, typer.Option(help="Chat template; default: recognised by the model's tokenizer.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a turn may take.")] = 600,
    sample: Annotated[float, typer.Option(min=0.1, help="Seconds between two samples of the server's pool.")] = 1,
    wandb: Annotated[bool, typer.Option("--wandb", help="Send the run to Weights & Biases, too; offline without a key.")] = False,
    wandb_project: Annotated[str, typer.Option(help="Project of that run.")] = "intentkv",
) -> int:
    """Replay recorded agents against a running server, closed loop, and measure hits, live tokens and latency.

    The next turn's prompt is the server's own output and the recorded tool result, so prefix hits are real.
    Exit status 1 when a turn failed; failed turns are recorded and counted.
    """
    if wandb:
        with _room("intentkv_eval.wandb_export", "run: pip install 'intentkv[wandb]'") as export:
            export.check()  # before the replay and not after it
    with _room("intentkv_eval.replay", _EVAL) as room:
        status: int = room.run(
            room.ReplayOptions(
                url=url,
                files=files,
                out=out,
                arm=arm,
                limit=limit,
                max_context=max_context,
                max_tokens=max_tokens,
                concurrency=concurrency,
                session_ids=session_ids,
                flush=flush,
                request=room.request_options(method=method, budget=budget, budget_ratio=budget_ratio, hysteresis=hysteresis),
                template=template,
                timeout_s=timeout,
                sample_s=sample,
            )
        )
    if wandb:
        typer.echo(f"Sent to Weights & Biases: {export.export(out, wandb_project)}")
    return status


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders that `intentkv replay`, `record`, `watch` or a benchmark wrote.")
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write; works offline.")] = Path("report.html"),
    compare: Annotated[bool, typer.Option("--compare", help="Print the ratios as a table, too.")] = False,
    baseline: Annotated[str | None, typer.Option(help="Run the others are compared with; default: stock, else the first.")] = None,
) -> None:
    """Draw runs side by side: what was saved, what it cost, over turns and time, with ratios and intervals."""
    with _room("intentkv_eval.report", _EVAL) as room:
        if compare:
            room.print_comparison(runs, baseline)
        room.write_report(runs, out, baseline)
    typer.echo(f"Report written to {out}.")


@app.command()
def watch(
    out: Annotated[Path, typer.Option(help="Folder for pool.jsonl and watch.json; `intentkv report` draws it.")],
    url: Annotated[str, typer.Option(help="The running server.")] = "http://127.0.0.1:30000",
    arm: Annotated[str | None, typer.Option(help="Name in reports; default: the server's method and budget.")] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two samples.")] = 5,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this long; default: at Ctrl-C.")] = None,
) -> None:
    """Record a running server's KV pool and counters over time, for the report."""
    with _room("intentkv_eval.samples", _EVAL) as room:
        room.watch(url, out, arm, every, seconds)
    typer.echo(f"Recording written to {out}.")


def main() -> None:
    """Entry point of the ``intentkv`` console script."""
    app(prog_name="intentkv")
