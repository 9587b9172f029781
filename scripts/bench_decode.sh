#!/usr/bin/env bash
# Decode step time over the logical length, pruned to a budget, against stock SGLang at the same logical and at the same live length.
#   scripts/bench_decode.sh --model DIR --batch 1 --batch 8 --load-format dummy --attention-backend triton --context-length 70000
# Arguments go to `python -m intentkv_eval.bench_decode` (see --help). Results: out/bench-decode/bench_decode.json.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
exec "$VENV/bin/python" -m intentkv_eval.bench_decode --out "$ROOT/out/bench-decode" "$@"
