"""Draw the pictures of finished benchmarks: ``python -m intentkv_eval.bench_pictures FILE...``, for results of a machine without plotly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from intentkv.config import ConfigError
from intentkv_eval import bench_arms, bench_capacity, bench_decode, bench_prune

_DRAW: dict[str, Callable[[str], str]] = {
    bench_capacity.RESULT_FILE: lambda text: bench_capacity.picture(bench_capacity.Result.model_validate_json(text)),
    bench_decode.RESULT_FILE: lambda text: bench_decode.picture(bench_decode.Result.model_validate_json(text)),
    bench_prune.RESULT_FILE: lambda text: bench_prune.picture(bench_prune.Result.model_validate_json(text)),
}

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=bench_arms.Command)
def main(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=f"Named {', '.join(_DRAW)}.")]) -> None:
    """Write an HTML page, which works offline, beside each result file."""
    for file in files:
        draw = _DRAW.get(file.name)
        if draw is None:
            raise ConfigError(f"No picture is known for {file.name!r}; give one of {', '.join(_DRAW)}.")
        try:
            text = file.read_text(encoding="utf-8")
            page = file.with_suffix(".html")
            page.write_text(draw(text), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot use {error.filename!r}: {error.strerror}; give a result file in a writable folder.") from error
        except ValidationError as error:
            raise ConfigError(f"{str(file)!r} is no result of this version: {error.errors()[0]['msg']}.") from error
        typer.echo(f"Written: {page}")


if __name__ == "__main__":
    app()
