#!/usr/bin/env bash
# Four agents at once on a KV pool of 60 % of what they need, stock SGLang and IntentKV: prefix-hit rate, recomputed tokens, wall time.
#   scripts/bench_equal_memory.sh --input agents.jsonl --model DIR --budget 2048
# Arguments go to `python -m intentkv_eval.capacity` (see --help). Results: out/equal-memory/capacity.json and one folder a run.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
exec "$VENV/bin/python" -m intentkv_eval.capacity --out "$ROOT/out/equal-memory" "$@"
