#!/usr/bin/env bash
# Lint, format check, types, then every test. Arguments go to pytest: scripts/test.sh [--] -m unit -k spans
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
setup
cd "$ROOT"
[[ "${1:-}" == "--" ]] && shift

failed=()
check() {
  say "$*"
  "$VENV/bin/$1" "${@:2}" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check mypy
for name in ${failed[@]+"${failed[@]}"}; do
  say "FAILED: $name (see above); the tests run all the same, the exit code will be 1"
done

say "pytest $*"
status=0
# Warnings of SWIG modules come at interpreter exit, behind pytest's closing line, which is to be the last.
"$VENV/bin/python" -W "ignore:builtin type:DeprecationWarning" -m pytest "$@" || status=$?
if ((status == 0 && ${#failed[@]} > 0)); then
  status=1
fi
exit "$status"
