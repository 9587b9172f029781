# Sourced by the scripts beside it. `setup` makes the checkout's own environment (.venv) once; later runs reuse it.
# PYTHON=/path/to/python overrides the interpreter. Needs a package index for pip on the first run and no other network.
# shellcheck shell=bash
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PINS="$ROOT/constraints/sglang-0.5.17.txt"
TRITON="triton==3.6.0"

say() { printf '== %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the path of a Python 3.10-3.12 that really runs: a version manager's shim may exist and still refuse.
find_python() {
  local candidate
  local check='import sys, venv, ensurepip; print(sys._base_executable); sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'
  if [[ -n "${PYTHON:-}" ]]; then
    "$PYTHON" -c "$check" 2>/dev/null || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.12 with venv; name one that is, or unset PYTHON."
    return
  fi
  for candidate in python3.11 python3.12 python3.10 python3 python; do
    if "$candidate" -c "$check" >/dev/null 2>&1; then
      "$candidate" -c "$check"
      return
    fi
  done
  fail "No Python 3.10, 3.11 or 3.12 with venv runs here; install one (and its venv module), or set PYTHON=/path/to/python."
}

# What the environment is made from; a checkout that moved or another interpreter also needs a new one.
fingerprint() {
  { printf '%s\n' "$ROOT"; "$1" -VV; sed '/^\[tool\./,$d' "$ROOT/pyproject.toml"; cat "$PINS" "${BASH_SOURCE[0]}"; } | cksum
}

install() {
  local python="$1"
  local pip=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --quiet)
  say "Making .venv with $("$python" -V)"
  "$python" -m venv --clear "$VENV" || fail "Could not make .venv; check that the checkout is writable and has some GB free."
  say "Installing torch (where pip has no CPU build of it, the CUDA build of several GB, which runs on a CPU too)"
  "${pip[@]}" -c "$PINS" torch || fail "pip could not install torch; see its message above. Is a package index reachable?"
  say "Installing SGLang 0.5.17 and the pinned packages"
  "${pip[@]}" --no-deps -r "$PINS" || fail "pip could not install the pins of ${PINS#"$ROOT"/}; see its message above."
  if ! "$VENV/bin/python" -c 'import triton' 2>/dev/null; then
    "${pip[@]}" --no-deps "$TRITON" || fail "pip could not install $TRITON; see its message above."
  fi
  say "Installing IntentKV from this checkout (editable)"
  "${pip[@]}" --no-build-isolation -c "$PINS" -e "${ROOT}[server,eval,train,dev]" || fail "pip could not install this checkout; see its message above."
}

setup() {
  local python wanted
  unset PYTHONPATH PYTHONHOME
  python="$(find_python)"
  wanted="$(fingerprint "$python")"
  if [[ -x "$VENV/bin/python" && "$(cat "$VENV/stamp" 2>/dev/null)" == "$wanted" ]]; then
    say "Using .venv (up to date)"
  else
    install "$python"
    printf '%s\n' "$wanted" >"$VENV/stamp"
  fi
  # From here on nothing needs a network, and what is written stays in the checkout.
  export HF_HUB_OFFLINE=1 HF_HOME="$ROOT/.cache/huggingface" XDG_CACHE_HOME="$ROOT/.cache"
  export TRITON_HOME="$ROOT/.cache" SGLANG_CACHE_DIR="$ROOT/.cache/sglang"
  export INTENTKV_CACHE="${INTENTKV_CACHE:-$ROOT/.cache/intentkv}"
  export PATH="$VENV/bin:$PATH"
}
