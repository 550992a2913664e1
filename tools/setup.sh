#!/usr/bin/env bash
# Sets up a machine for development: system packages where apt is there, and a virtual environment in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ make cmake ninja-build libhwy-dev nlohmann-json3-dev libcli11-dev libgtest-dev libgmock-dev
          libbenchmark-dev clang-format clang-tidy valgrind python3-venv)
if command -v apt-get >/dev/null; then
  missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing+=("$package")
  done
  if ((${#missing[@]})); then
    echo "setup: installing ${missing[*]}"
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq "${missing[@]}" >/dev/null
  fi
else
  echo "setup: no apt-get here; these Debian packages, or what they are called here, are needed: ${packages[*]}"
fi

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup: Python 3.11 or later is needed to develop (the package itself takes 3.9), got $(python3 --version)" >&2
  exit 1
fi
[ -x .venv/bin/python ] || python3 -m venv .venv
echo "setup: installing the Python packages of requirements-dev.txt into .venv"
# torch by itself first: packages that depend on it must not choose another version.
.venv/bin/pip install -q --disable-pip-version-check "$(grep '^torch==' requirements-dev.txt)"
.venv/bin/pip install -q --disable-pip-version-check -r requirements-dev.txt
touch .venv/.ready
