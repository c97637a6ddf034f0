#!/usr/bin/env bash
# Makes this checkout ready to use: .venv with torch, dtorch (editable) and all that examples and tests need, and the
# native modules built. quickstart.sh and test.sh begin with it. It says what it does and how long that took, does
# nothing twice, and stops at the first missing thing with its name.
#
#   PYTHON=python3.12 scripts/setup.sh     choose the Python (3.11 or newer) that .venv is made from
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
stamp=$venv/dtorch-setup # holds the hash of what the installed packages follow from

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}
# step WHAT COMMAND...: runs it, its output indented, and says how long it took.
step() {
  local what=$1 started=$SECONDS
  shift
  say "$what ..."
  "$@" 2>&1 | sed 's/^/  /' || fail "$what failed after $((SECONDS - started)) s; the lines above say why"
  say "$what: $((SECONDS - started)) s"
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer is missing (tried: ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11})" \
    "Install it, or name it: PYTHON=/path/to/python3.11 $0"
}

need_disk() { # MiB
  local free
  free=$(df -Pm . | awk 'NR == 2 {print $4}')
  [ "$free" -ge "$1" ] || fail "too little disk space: $free MiB are free at $PWD, $1 MiB are needed"
}

make_venv() {
  local python
  python=$(find_python)
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module" "Install it, for instance: apt-get install python3-venv"
  "$python" native/build.py --check # before anything is downloaded
  step "making $venv with $("$python" --version)" "$python" -m venv "$venv"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

install_packages() {
  local torch
  # A torch that is there stays if dtorch supports it; else the one that dtorch is tested with is installed.
  if ! torch=$("$venv/bin/python" native/build.py --installed-torch 2>/dev/null); then
    need_disk 4000 # torch and what the examples and tests need take 1.5 GiB unpacked; with CUDA much more
    torch=$("$venv/bin/python" native/build.py --torch)
    step "installing $torch" pip install -qq "$torch" "setuptools>=77" wheel
  fi
  "$venv/bin/python" native/build.py
  torch=$("$venv/bin/python" native/build.py --installed-torch)
  # torch is named once more so that nothing else replaces it; the build is the one just made, so not isolated.
  step "installing dtorch and what its examples and tests need" \
    pip install -qq --no-build-isolation --editable '.[examples,test]' "$torch" "setuptools>=77" wheel
}

recipe() { cat setup.cfg setup.py pyproject.toml scripts/setup.sh | sha256sum; }

[ -x "$venv/bin/pip" ] || make_venv
if [ "$(cat "$stamp" 2>/dev/null)" != "$(recipe)" ]; then
  need_disk 500
  install_packages
  recipe >"$stamp"
fi
"$venv/bin/python" native/build.py
