#!/usr/bin/env bash
# GPU benchmarks on one or several equal GPUs, in the current environment (SGLang for CUDA and this checkout installed). Every GPU holds a
# stock server and one with the plugin, with the same KV pool; jobs are taken from one list, and a GPU runs one at a time. For example:
#   MODEL=DIR INPUT=agents.jsonl scripts/bench_gpus.sh --load-format dummy --attention-backend flashinfer --context-length 131072
# Arguments go to the servers. Settings, by environment:
#   GPUS     indices of the GPUs                                                   ("0 1")
#   POOL     KV pool of each server, in tokens; two must fit one GPU               (321000)
#   STEPS    any of overhead, prune, and decode-BATCH:LENGTH,LENGTH...             ("overhead prune decode-1:4096,8192,32768")
#   CELLS    KIND:SESSIONS:ARM,ARM... of bench_capacity, KIND long or recorded     ("long:16:stock,assistant:8192")
#   WINDOW   seconds of each measured window; stock, far slower, gets twice it      (50)
#   WARMUP   at most this many seconds until every session has finished a turn     (100)
#   OUT      folder of the results                                                 (out/bench-gpus)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${MODEL:?set MODEL to a model folder}" "${INPUT:?set INPUT to recorded agents, JSONL}"
GPUS="${GPUS:-0 1}" POOL="${POOL:-321000}" WINDOW="${WINDOW:-50}" WARMUP="${WARMUP:-100}" OUT="${OUT:-out/bench-gpus}"
STEPS="${STEPS-overhead prune decode-1:4096,8192,32768}" CELLS="${CELLS-long:16:stock,assistant:8192}"
mkdir "$OUT" "$OUT/claimed" || { echo "error: $OUT holds results; set OUT to a new folder." >&2; exit 2; }
pids=()
stop() {
  local pid
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
}
trap stop EXIT

# serve GPU KIND flags...
serve() {
  local gpu="$1" kind="$2" port
  port="$(port_of "$gpu" "$kind")"
  shift 2
  CUDA_VISIBLE_DEVICES="$gpu" python3 -m intentkv serve --model "$MODEL" --host 127.0.0.1 --port "$port" --enable-metrics \
    --max-total-tokens "$POOL" "$@" >"$OUT/$kind-$gpu.log" 2>&1 &
  pids+=("$!")
}

port_of() { echo "$((31000 + 10 * $1 + ${#2}))"; }

healthy() {
  local pid="${pids[$3]}"
  for _ in $(seq 600); do
    curl -sf -m 5 "http://127.0.0.1:$(port_of "$1" "$2")/health" >/dev/null && return
    kill -0 "$pid" 2>/dev/null || break
    sleep 1
  done
  echo "error: the $2 server of GPU $1 did not become healthy; see $OUT/$2-$1.log" >&2
  exit 1
}

# run_job GPU JOB: a step, or KIND:SESSIONS:ARM[:BUDGET]
run_job() {
  local gpu="$1" job="$2" kind sessions arm length lengths=() options=()
  local stock=(--url-stock "http://127.0.0.1:$(port_of "$gpu" stock)" --log-stock "$OUT/stock-$gpu.log")
  local plugin=(--url-plugin "http://127.0.0.1:$(port_of "$gpu" plugin)" --log-plugin "$OUT/plugin-$gpu.log")
  case "$job" in
    overhead)
      python3 -m intentkv_eval.bench_overhead --model "$MODEL" --out "$OUT/overhead" "${stock[@]}" "${plugin[@]}" --arm assistant --length 4096
      ;;
    prune) python3 -m intentkv_eval.bench_prune --model "$MODEL" --out "$OUT/prune" "${plugin[@]}" --length 32768 ;;
    decode-*)
      IFS=:, read -ra lengths <<<"${job#decode-}"
      for length in "${lengths[@]:1}"; do options+=(--length "$length"); done
      python3 -m intentkv_eval.bench_decode --model "$MODEL" --out "$OUT/decode-${lengths[0]}" "${stock[@]}" "${plugin[@]}" \
        --batch "${lengths[0]}" "${options[@]}" --arm stock --arm assistant:8192 --arm assistant:4096
      ;;
    *)
      IFS=: read -r kind sessions arm <<<"$job"
      [[ "$kind" == long ]] && options+=(--long)
      if [[ "$arm" == stock ]]; then
        options+=("${stock[@]}" --seconds "$((WINDOW * 2))")
      else
        options+=("${plugin[@]}" --seconds "$WINDOW")
      fi
      python3 -m intentkv_eval.bench_capacity --input "$INPUT" --model "$MODEL" --out "$OUT/$kind-$sessions/${arm/:/-}" --arm "$arm" \
        --concurrent "$sessions" --warmup "$WARMUP" "${options[@]}"
      ;;
  esac
}

read -ra jobs <<<"$STEPS"
arms=()
for cell in $CELLS; do
  IFS=: read -r kind sessions list <<<"$cell"
  IFS=, read -ra names <<<"$list"
  for arm in "${names[@]}"; do
    # stock takes longest, so it goes first
    if [[ "$arm" == stock ]]; then jobs+=("$kind:$sessions:$arm"); else arms+=("$kind:$sessions:$arm"); fi
  done
done
jobs+=("${arms[@]}")

worker() {
  local job name started
  for job in "${jobs[@]}"; do
    name="${job//[:,]/-}"
    mkdir "$OUT/claimed/$name" 2>/dev/null || continue
    started="$SECONDS"
    run_job "$1" "$job" >"$OUT/$name.txt" 2>&1 || echo "$job: exit status $?, see $OUT/$name.txt"
    echo "$job: GPU $1, $((SECONDS - started)) s"
  done
}

for gpu in $GPUS; do
  serve "$gpu" stock --stock "$@"
  serve "$gpu" plugin "$@"
done
started=0
for gpu in $GPUS; do
  healthy "$gpu" stock "$started"
  healthy "$gpu" plugin "$((started + 1))"
  started="$((started + 2))"
done
workers=()
for gpu in $GPUS; do
  worker "$gpu" &
  workers+=("$!")
done
wait "${workers[@]}"
for cell in $CELLS; do
  IFS=: read -r kind sessions _ <<<"$cell"
  # it says itself what is missing; the other cells are still worth putting together
  python3 -m intentkv_eval.bench_merge "$OUT/$kind-$sessions/"*/bench_capacity.json --out "$OUT/$kind-$sessions" || true
done
