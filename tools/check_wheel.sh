#!/usr/bin/env bash
# Builds the wheel from the committed files alone, installs it beside another torch than development's, by default the
# oldest that is supported, and runs a smoke test of the installed package. Downloads some 3 GB of torch the first time.
# Usage: tools/check_wheel.sh [torch version]
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${1:-2.4.0}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
git archive HEAD | tar -x -C "$work/source"
python3 -m venv "$work/venv"
pip="$work/venv/bin/pip --disable-pip-version-check -q"

echo "check_wheel: building from $(git rev-parse --short HEAD)"
$pip wheel --no-deps --wheel-dir "$work/wheels" "$work/source"
echo "check_wheel: installing $(basename "$work"/wheels/*.whl) beside torch $torch"
$pip install "torch==$torch" "$work"/wheels/*.whl
cp "$work/source/tests/wheel_smoke.py" "$work"
cd "$work" # nothing of the checkout is in reach
venv/bin/python wheel_smoke.py
