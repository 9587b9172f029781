"""Put results of ``bench_capacity`` together whose servers ran side by side: ``python -m intentkv_eval.bench_merge FILE... --out FOLDER``.

Where a machine has several equal GPUs, each arm's server can have one to itself, at the same time and for the same sessions. Every arm then
has a result of its own, and what is compared lies in several files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from intentkv.config import ConfigError
from intentkv_eval import bench_arms
from intentkv_eval.bench_capacity import RESULT_FILE, Result, picture, ratios, tables

_OF_THE_RUN = {"arms", "rounds", "seconds", "warmup_s", "pools", "together", "timeout_s", "start_timeout_s", "server_arguments"}
"""Options that may differ."""


def merge(results: Sequence[Result]) -> Result:
    """One result with the cells of all, and their ratios.

    Raises:
        ConfigError: the machines, sessions or pools were not the same.
    """
    first = results[0]
    for result in results[1:]:
        known, other = (r.options.model_dump(exclude=_OF_THE_RUN) for r in (first, result))
        differing = [name for name, value in known.items() if other[name] != value]
        differing += [name for name in ("device", "data_sha256") if getattr(first.origin, name) != getattr(result.origin, name)]
        differing += ["session_tokens"] if first.session_tokens != result.session_tokens else []
        if differing:
            raise ConfigError(f"The results differ in {', '.join(differing)}; merge only runs of the same sessions on the same machine.")
    cells = [cell for result in results for cell in result.cells]
    if len({cell.pool_tokens for cell in cells}) > len({cell.pool_share for cell in cells}):
        raise ConfigError("The servers' pools differ; start all of them with the same --max-total-tokens.")
    servers = {name: provenance for result in results for name, provenance in result.origin.servers.items()}
    arms = [arm for result in results for arm in result.options.arms]
    return first.model_copy(
        update={
            "origin": first.origin.model_copy(update={"servers": servers}),
            "options": first.options.model_copy(update={"arms": arms}),
            "cells": cells,
            "ratios": ratios(cells),
        }
    )


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=bench_arms.Command)
def main(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=f"Named {RESULT_FILE}.")],
    out: bench_arms.OutOption,
) -> None:
    """Write one result file, with ratios, from several, and print its tables."""
    try:
        results = [Result.model_validate_json(file.read_text(encoding="utf-8")) for file in files]
    except OSError as error:
        raise ConfigError(f"Cannot read {error.filename!r}: {error.strerror}; give result files.") from error
    except ValidationError as error:
        raise ConfigError(f"A file is no result of this version: {error.errors()[0]['msg']}.") from error
    merged = merge(results)
    target = bench_arms.new_folder(out, RESULT_FILE)
    target.write_text(merged.model_dump_json(indent=2) + "\n", encoding="utf-8")
    bench_arms.write_picture(target, lambda: picture(merged))
    Console(width=200).print(*tables(merged))


if __name__ == "__main__":
    app()
