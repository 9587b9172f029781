#!/usr/bin/env bash
# Two servers one after the other on this machine's CPU, stock SGLang and IntentKV, with the same research-agent session; prints a
# comparison and writes out/quickstart/summary.json and report.html. Arguments go to `python -m intentkv_eval.quickstart` (see --help).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
cd "$ROOT"
exec "$VENV/bin/python" -m intentkv_eval.quickstart "$@"
