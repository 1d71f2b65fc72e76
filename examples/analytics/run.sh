#!/bin/sh
# Three jobs over the webhook events, from a fresh clone: installs Spark into .venv if it is not
# there, starts a server, loads, seals, draws. Needs Java. Pictures and Parquet files are written to
# OUT.
#     examples/analytics/run.sh [OUT]
set -eu
root=$(CDPATH='' cd -P -- "$(dirname -- "$0")/../.." && pwd -P)
out=${1-analytics-out}
"$root/run" spark-setup
exec "$root/.venv/bin/python" "$root/examples/analytics/run.py" "$out"
