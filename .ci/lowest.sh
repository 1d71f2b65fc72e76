#!/usr/bin/env bash
# Installs exactly the lower bounds of pyproject.toml into a separate environment and runs the tests
# that depend on details of a library. `lowest.sh REPORT` writes a JUnit report. Spark's bounds are
# not included.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
report=$1
home=.lowest
python3 -m venv --clear "$home"
"$home/bin/python" - >"$home/lowest.txt" <<'PYTHON'
"""Print each dependency of the server and its tests at its lower bound."""
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for bound in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
    name, found, version = bound.partition(">=")
    assert found and "," not in version, f"{bound} is no lower bound"
    print(f"{name}=={version}")
PYTHON
install() { "$home/bin/python" -m pip --disable-pip-version-check --no-input install --quiet "$@"; }
install -r "$home/lowest.txt"
install --no-deps --no-build-isolation -e .
"$home/bin/python" -m pytest -q -p no:cacheprovider -m "not slow and not crash" --junitxml="$report" \
    tests/unit/http tests/unit/api/test_direct.py tests/api/test_framing.py \
    tests/unit/cli tests/unit/test_settings.py tests/unit/values/test_json_cache.py \
    tests/unit/values/test_appends.py tests/unit/runtime/test_metrics.py tests/contract/test_small_words.py \
    tests/contract/watch/test_watch_stream.py tests/contract/watch/test_ws.py tests/api/watch/test_ws.py
