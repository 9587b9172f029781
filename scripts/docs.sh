#!/usr/bin/env bash
# API reference of the public names, from their docstrings, as HTML in out/docs. Arguments are modules; default: all packages.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
cd "$ROOT"
# Modules that need a GPU compiler at import are read on a CPU, too.
export TRITON_INTERPRET=1
if (($# == 0)); then
  set -- intentkv intentkv_sglang intentkv_training intentkv_eval
fi
# Through Python, since SGLang's modules import torchvision, which beside a CPU build of torch needs help (intentkv_sglang/vision.py).
pdoc='from intentkv_sglang.vision import ensure_torchvision_imports as ensure; ensure(); from pdoc.__main__ import cli; cli()'
"$VENV/bin/python" -W ignore -c "$pdoc" --docformat google --output-directory "$ROOT/out/docs" "$@"
say "API reference: ${ROOT}/out/docs/index.html"
