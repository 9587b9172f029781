#!/usr/bin/env bash
# All GPU benchmarks on a machine with two equal GPUs, in the current environment (SGLang for CUDA and this checkout installed): stock SGLang
# on the first GPU and the plugin on the second play the same sessions with the same KV pool, at the same time; overhead, decode steps and
# evictions are measured between the plugin and a small stock server beside it on the second GPU. For example:
#   MODEL=DIR INPUT=agents.jsonl scripts/bench_gpu_pair.sh --load-format dummy --attention-backend flashinfer --context-length 131072
# Arguments go to the servers. Settings, by environment:
#   POOL     KV pool of the two compared servers, in tokens           (321000)
#   CELLS    KIND:SESSIONS[:ARM,ARM...] with KIND long or recorded    ("long:16 recorded:16", arms assistant:8192)
#   STEPS    1: also overhead, decode steps and evictions             (1)
#   WINDOW   seconds of each measured window; stock gets 1.5 times it (50)
#   OUT      folder of the results                                    (out/bench-gpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${MODEL:?set MODEL to a model folder}" "${INPUT:?set INPUT to recorded agents, JSONL}"
POOL="${POOL:-321000}" CELLS="${CELLS:-long:16 recorded:16}" STEPS="${STEPS:-1}" WINDOW="${WINDOW:-50}" OUT="${OUT:-out/bench-gpu}"
mkdir -p "$OUT"
pids=()
stop() {
  local pid
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
}
trap stop EXIT

# serve GPU NAME PORT flags...
serve() {
  local gpu="$1" name="$2" port="$3"
  shift 3
  CUDA_VISIBLE_DEVICES="$gpu" python3 -m intentkv serve --model "$MODEL" --host 127.0.0.1 --port "$port" --enable-metrics "$@" >"$OUT/$name.log" 2>&1 &
  pids+=("$!")
}

healthy() {
  for _ in $(seq 600); do
    curl -sf -m 5 "http://127.0.0.1:$2/health" >/dev/null && return
    sleep 1
  done
  echo "error: the server did not become healthy; see $OUT/$1.log" >&2
  exit 1
}

STOCK="--url-stock http://127.0.0.1:31001 --log-stock $OUT/stock.log"
PLUGIN="--url-plugin http://127.0.0.1:31002 --log-plugin $OUT/plugin.log"
SMALL="--url-stock http://127.0.0.1:31003 --log-stock $OUT/small.log"
serve 0 stock 31001 --stock --max-total-tokens "$POOL" "$@"
serve 1 plugin 31002 --max-total-tokens "$POOL" "$@"
healthy stock 31001
healthy plugin 31002
if [[ "$STEPS" == 1 ]]; then
  serve 1 small 31003 --stock --max-total-tokens 90000 "$@"
  healthy small 31003
fi

# capacity FOLDER KIND SESSIONS WINDOW options...
capacity() {
  local folder="$1" kind="$2" sessions="$3" window="$4"
  shift 4
  [[ "$kind" == long ]] && set -- --long "$@"
  python3 -m intentkv_eval.bench_capacity --input "$INPUT" --model "$MODEL" --out "$OUT/$folder" --concurrent "$sessions" \
    --seconds "$window" "$@" >"$OUT/$folder.txt" 2>&1 || echo "$folder: exit status $?, see $OUT/$folder.txt"
}

stock_cells() {
  for cell in $CELLS; do
    IFS=: read -r kind sessions _ <<<"$cell"
    capacity "stock-$kind-$sessions" "$kind" "$sessions" "$((WINDOW * 3 / 2))" $STOCK --arm stock
  done
}

plugin_cells() {
  if [[ "$STEPS" == 1 ]]; then
    python3 -m intentkv_eval.bench_overhead --model "$MODEL" --out "$OUT/overhead" $SMALL $PLUGIN --arm assistant --length 4096
    python3 -m intentkv_eval.bench_decode --model "$MODEL" --out "$OUT/decode" $SMALL $PLUGIN --batch 1 --batch 8 \
      --length 4096 --length 8192 --length 32768
    python3 -m intentkv_eval.bench_prune --model "$MODEL" --out "$OUT/prune" $PLUGIN --length 32768
  fi
  for cell in $CELLS; do
    IFS=: read -r kind sessions arms <<<"$cell"
    options=()
    IFS=, read -ra names <<<"${arms:-assistant:8192}"
    for arm in "${names[@]}"; do options+=(--arm "$arm"); done
    capacity "plugin-$kind-$sessions" "$kind" "$sessions" "$WINDOW" $PLUGIN "${options[@]}"
  done
}

stock_cells &
stock_side=$!
plugin_cells
wait "$stock_side"
for cell in $CELLS; do
  IFS=: read -r kind sessions _ <<<"$cell"
  python3 -m intentkv_eval.bench_merge "$OUT/"{stock,plugin}"-$kind-$sessions/bench_capacity.json" --out "$OUT/$kind-$sessions"
done
