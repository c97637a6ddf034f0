#!/usr/bin/env bash
# Sets everything up and lets diffusers' Stable Diffusion 3 pipeline paint a picture on two CPU workers; prints a table
# that compares dtorch with plain PyTorch, and where the picture is. Arguments go to examples/sd3.py:
#
#   scripts/quickstart.sh --preset small --prompt "a lighthouse"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
echo "quickstart: examples/sd3.py on two CPU workers"
exec .venv/bin/python examples/sd3.py --preset tiny --workers 2 --check --table --out out/sd3.png "$@"
