#!/usr/bin/env bash
# Train a head for a model from logs of agents and compare it with the rules and the oracles on held-out groups. For example:
#   scripts/train_head.sh DIR agents.jsonl more.jsonl
# DIR is the model. Results: out/head/{examples,assistant-learned,results}; each step goes on where it was interrupted.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
(($# >= 2)) || fail "Usage: scripts/train_head.sh MODEL_DIR LOG..."
model="$1"
inputs=()
for log in "${@:2}"; do
  inputs+=(--input "$log")
done
setup
out="$ROOT/out/head"
train() { "$VENV/bin/python" -m intentkv train "$@"; }
train examples "${inputs[@]}" --model "$model" --out "$out/examples"
train fit --examples "$out/examples" --out "$out/assistant-learned" --model "$model" "${inputs[@]}" --no-wandb
train evaluate "${inputs[@]}" --model "$model" --examples "$out/examples" --head "$out/assistant-learned" --out "$out/results"
