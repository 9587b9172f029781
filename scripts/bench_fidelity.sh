#!/usr/bin/env bash
# What each method costs in prediction when 10 % and 25 % of the history stay: change of NLL and top-1 agreement against the full cache,
# teacher-forced on recorded agents. Starts a server unless --url names one; continues an interrupted run. For example:
#   scripts/bench_fidelity.sh --input agents.jsonl --model DIR
# Arguments go to `python -m intentkv_eval.fidelity` (see --help). Results: out/fidelity/summary.json and rows.jsonl.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
exec "$VENV/bin/python" -m intentkv_eval.fidelity --out "$ROOT/out/fidelity" "$@"
