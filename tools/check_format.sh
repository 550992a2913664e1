#!/usr/bin/env bash
# Checks, or with --fix mends, the format of all C++, CUDA and Python files under version control.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t cpp < <(git ls-files '*.h' '*.hpp' '*.cpp' '*.cu' '*.cuh')
if [ "${1:-}" = --fix ]; then
  clang-format -i "${cpp[@]}"
  .venv/bin/ruff check -q --fix .
  .venv/bin/ruff format -q .
else
  clang-format --dry-run -Werror "${cpp[@]}"
  .venv/bin/ruff check -q .
  .venv/bin/ruff format -q --check .
fi
