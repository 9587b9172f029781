#!/usr/bin/env bash
# What one eviction costs over the length of the request, and its share of the turn.
#   scripts/bench_prune.sh --model DIR --load-format dummy --attention-backend triton --context-length 70000
# Arguments go to `python -m intentkv_eval.bench_prune` (see --help). Results: out/bench-prune/bench_prune.json.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
exec "$VENV/bin/python" -m intentkv_eval.bench_prune --out "$ROOT/out/bench-prune" "$@"
