#!/usr/bin/env bash
# What the plugin costs while it prunes nothing: a stock server and one with the plugin on the same device, taking turns.
#   scripts/bench_overhead.sh --model DIR --load-format dummy --attention-backend triton --context-length 70000 --mem-fraction-static 0.4
# Arguments go to `python -m intentkv_eval.bench_overhead` (see --help). Results: out/bench-overhead/bench_overhead.json.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
exec "$VENV/bin/python" -m intentkv_eval.bench_overhead --out "$ROOT/out/bench-overhead" "$@"
