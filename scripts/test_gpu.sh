#!/usr/bin/env bash
# The GPU tests, in the current environment (SGLang for CUDA and this checkout installed). Arguments go to pytest: -k triton
# Each server takes a minute or two to start; -rP shows the distances that were measured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Without --strict-config: pytest-timeout, whose setting pyproject.toml has, may be missing here.
exec python3 -m pytest -o addopts="--strict-markers --import-mode=importlib" tests/gpu -rsP "$@"
