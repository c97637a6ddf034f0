#!/usr/bin/env bash
# Sets everything up, then: ruff, a strict type check, the test suite. Arguments go to pytest:
#
#   scripts/test.sh tests/test_protocol.py -k version
#   scripts/test.sh --conformance                all of PyTorch's own tests instead of the suite, which has a sample of them;
#                                                hours; writes docs/conformance.md; arguments go to python -m tests.conformance
#   DTORCH_SANITIZE=address scripts/test.sh      the same with an address-sanitizer build of the native modules
#
# Besides the verdict of what ran the run fails when
#   - PyTorch warned that an operator has no autograd kernel (gradients would be missing, silently);
#   - a process of dtorch outlives the tests, or a dtorch-* directory or segment is left;
#   - a sanitizer reported something.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
bin=.venv/bin

fail() {
  printf 'test: %s\n' "$@" >&2
  failed=1
}
timed() { # NAME COMMAND...
  local name=$1 started=$SECONDS
  shift
  "$@" || { printf 'test: %s failed\n' "$name" >&2 && exit 1; }
  echo "test: $name: $((SECONDS - started)) s"
}
timed "ruff" "$bin/ruff" check .
timed "mypy --strict" "$bin/mypy"

# The run gets temporary and run-time directories of its own: what is left there is ours, whatever else the machine
# does meanwhile. The path is short because a Unix socket's name is limited to 107 bytes.
scratch=$(mktemp -d "${TMPDIR:-/tmp}/dt.XXXXXX")
mkdir -m 700 "$scratch/run" "$scratch/tmp"
export XDG_RUNTIME_DIR=$scratch/run TMPDIR=$scratch/tmp DTORCH_TEST_RUN=$scratch
export PYTHONFAULTHANDLER=1
preload=
if [ -n "${DTORCH_SANITIZE:-}" ]; then
  # The interpreter is not built with the sanitizer, so its run-time library must be there first.
  case $DTORCH_SANITIZE in
  *address*) preload=$("${CXX:-c++}" -print-file-name=libasan.so) ;;
  esac
  export ASAN_OPTIONS=detect_leaks=0:log_path=$scratch/sanitizer UBSAN_OPTIONS=print_stacktrace=1:log_path=$scratch/sanitizer
fi

failed=0
runner=(pytest)
[ -t 1 ] && runner+=(--color=yes)
if [ "${1:-}" = --conformance ]; then
  shift
  runner=(tests.conformance --dtypes all --samples all --page docs/conformance.md)
fi
started=$SECONDS
echo "test: ${runner[0]}"
set +e
LD_PRELOAD=$preload "$bin/python" -m "${runner[@]}" "$@" 2>&1 | tee "$scratch/output"
status=${PIPESTATUS[0]}
set -e
[ "$status" -eq 0 ] || fail "the exit status of ${runner[0]} is $status (after $((SECONDS - started)) s)"

if grep -q 'autograd kernel was not registered to the Autograd key' "$scratch/output"; then
  fail "an operator without an autograd kernel was differentiated:" \
    "$(grep -m 3 'autograd kernel was not registered' "$scratch/output")"
fi
# A process of ours has DTORCH_ROLE in its environment, one of this run DTORCH_TEST_RUN as well. Two seconds to leave.
leftovers() {
  local entry
  for entry in /proc/[0-9]*; do
    if grep -qz '^DTORCH_ROLE=' "$entry/environ" 2>/dev/null && grep -qzxF "DTORCH_TEST_RUN=$scratch" "$entry/environ" 2>/dev/null; then
      printf '%s %s\n' "${entry#/proc/}" "$(tr '\0' ' ' <"$entry/cmdline" 2>/dev/null)"
    fi
  done
}
for _ in 1 2 3 4 5 6 7 8 9 10; do
  left=$(leftovers)
  [ -n "$left" ] || break
  sleep 0.2
done
[ -z "$left" ] || fail "processes of dtorch outlive the tests:" "$left"
left=$(find "$XDG_RUNTIME_DIR" "$TMPDIR" -maxdepth 1 -name 'dtorch-*')
[ -z "$left" ] || fail "left behind by the tests:" "$left"
if compgen -G "$scratch/sanitizer.*" >/dev/null; then
  fail "the sanitizer reported:" "$(cat "$scratch"/sanitizer.* | head -60)"
fi
[ "$failed" -eq 0 ] && rm -rf "$scratch" || echo "test: $scratch is kept to be looked at" >&2
exit "$failed"
