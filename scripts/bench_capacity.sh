#!/usr/bin/env bash
# Throughput with a KV pool smaller than the working set, stock SGLang and eviction methods, closed loop with the sizes of recorded
# sessions: turns, tasks and tokens per second, TTFT and TPOT, recomputed tokens, ratios against stock, and a picture. For example:
#   scripts/bench_capacity.sh --input agents.jsonl --model DIR --long --pool 0.3 --pool 0.6 --arm stock --arm assistant:8192 \
#     --load-format dummy --attention-backend triton --context-length 131072
# Arguments go to `python -m intentkv_eval.bench_capacity` (see --help). Results: out/bench-capacity/bench_capacity.json and .html.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
exec "$VENV/bin/python" -m intentkv_eval.bench_capacity --out "$ROOT/out/bench-capacity" "$@"
