#!/bin/sh
# Splits the webhook events of one topic by their tag: routers copy them into topics and into a job
# queue, whose jobs are then done. It needs a running server (TOPICS_URL, default
# http://127.0.0.1:4000) and the command `topics` (TOPICS sets another path). The names of all its
# topics begin with HOOKS. They are removed at the end, unless KEEP=1.
set -eu

here=$(CDPATH='' cd -P -- "$(dirname -- "$0")" && pwd -P)
events=$here/../webhooks/github-webhooks.jsonl.gz
topics=${TOPICS-topics}
hooks=${HOOKS-hooks}
done_jobs=$(mktemp)
worker=

step() { printf '\n== %s\n' "$*"; }
show() {
    printf '$ topics %s\n' "$*"
    "$topics" "$@"
}
field() { sed -n 's/.*"'"$1"'":\([0-9]*\).*/\1/p'; }
in_file() { gzip -dc "$events" | grep -c '^{"event":"'"$1"; }
in_topic() { "$topics" info "$1" --json | field count; }
level() {
    while [ "$("$topics" router get "$1" --json | field lag)" -gt 0 ]; do sleep 0.1; done
}
finish() {
    [ -z "$worker" ] || kill "$worker" 2>/dev/null || :
    wait
    rm -f "$done_jobs"
}
trap finish EXIT
trap 'exit 1' INT TERM

step "A topic for everything, and routers that split it; a destination may be a queue"
show put "$hooks" --json
show put "$hooks.jobs" --type queue --json
show router put "$hooks->$hooks.pushes" --source "$hooks" --dest "$hooks.pushes" --filter-tag push --json
show router put "$hooks->$hooks.checks" --source "$hooks" --dest "$hooks.checks" --filter-prefix check_ --json
show router put "$hooks->$hooks.jobs" --source "$hooks" --dest "$hooks.jobs" --filter-prefix pull_request --exactly-once --json
show router put "$hooks->$hooks.audit" --source "$hooks" --dest "$hooks.audit" --json
show routers --source "$hooks" --graph tree

step "329 events; their names are their tags"
show load "$hooks" "$events" --data-field payload --tag-field event --json

step "Each router has seen all of them, and copied its own"
for dest in pushes checks jobs audit; do level "$hooks->$hooks.$dest"; done
show router ls --source "$hooks" --table
pushes=$(in_topic "$hooks.pushes")
checks=$(in_topic "$hooks.checks")
jobs=$(in_topic "$hooks.jobs")
audit=$(in_topic "$hooks.audit")
printf '%s pushes, %s checks, %s jobs, %s in all; in the file: %s, %s, %s, %s\n' \
    "$pushes" "$checks" "$jobs" "$audit" \
    "$(in_file 'push"')" "$(in_file check_)" "$(in_file pull_request)" "$(in_file '')"
[ "$pushes" -eq "$(in_file 'push"')" ]
[ "$checks" -eq "$(in_file check_)" ]
[ "$jobs" -eq "$(in_file pull_request)" ]
[ "$audit" -eq "$(in_file '')" ]

step "What was forwarded does not depend on where it came from"
show delete "$hooks" --tag push --yes --json
[ "$(in_topic "$hooks.pushes")" -eq "$pushes" ]

step "Work the jobs off"
DONE=$done_jobs "$topics" work "$hooks.jobs" --concurrency 2 -- \
    sh -c 'cat >/dev/null; echo "$TOPICS_JOB_SEQ" >>"$DONE"' &
worker=$!
while [ "$(in_topic "$hooks.jobs")" -gt 0 ]; do sleep 0.2; done
kill "$worker"
wait "$worker" || :
worker=
printf '%s jobs done\n' "$(sort -u "$done_jobs" | wc -l | tr -d ' ')"
[ "$(sort -u "$done_jobs" | wc -l)" -eq "$jobs" ]

[ -n "${KEEP-}" ] || {
    step "Remove the topics; their routers go with them"
    for name in "$hooks" "$hooks.pushes" "$hooks.checks" "$hooks.jobs" "$hooks.audit"; do
        show rm "$name" --yes --json
    done
}
