"""``python -m intentkv_sglang.launch``: SGLang's own launcher behind the start-up guards.

SGLang spawns its schedulers from this module, so what it does on import happens in them too, before they import SGLang.
"""

from __future__ import annotations

import os
import sys

from intentkv.config import config_from_environment
from intentkv_sglang.vision import ensure_torchvision_imports

ensure_torchvision_imports()


def main(arguments: list[str]) -> int:
    """Run the server until it is stopped.

    Returns:
        2 when a guard fired: one line on stderr for each says what to change.
    """
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from intentkv_sglang import compat, guards

    load_plugins()
    server_args = prepare_server_args(arguments)
    if server_args.radix_cache_backend == compat.BACKEND_NAME:
        problems = guards.environment_problems() + guards.server_problems(server_args)
        problems += guards.head_problems(config_from_environment(), server_args)
        for problem in problems:
            print(f"Error: {problem}", file=sys.stderr)
        if problems:
            return 2
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
