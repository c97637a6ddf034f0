#!/usr/bin/env bash
# Everything that only a machine with GPUs can tell, in one command and less than eight minutes: builds the native modules
# against the torch that is found there, runs the tests marked gpu, the examples with --check, and the benchmarks with
# PyTorch CUDA beside; writes docs/gpu-results.md. A step that fails or takes too long is noted, and the next one follows.
# The exit status is 0 when every step has passed.
#
#   PYTHON=python3.12 scripts/gpu_check.sh       the Python (3.11 to 3.13) that has torch (2.11 or newer, with CUDA)
#   scripts/gpu_check.sh --out results.md        another file
#   scripts/gpu_check.sh --no-install            does not ask pip for what is missing (never for torch)
#   scripts/gpu_check.sh --rehearse              the same on the CPU, for work on this script; writes to build/gpu_check
#
# scripts/gpu_check.py has the steps and their limits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  printf 'gpu_check: %s is not a Python of 3.11 or newer; name one: PYTHON=python3.12 %s\n' "$python" "$0" >&2
  exit 2
fi
exec "$python" scripts/gpu_check.py "$@"
