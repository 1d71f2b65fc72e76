#!/bin/sh
# The walk-through of WALKTHROUGH.md as a script. It needs a running server (TOPICS_URL, default
# http://127.0.0.1:4000) and the command `topics` (TOPICS sets another path). It creates its topic
# and removes it at the end, unless KEEP=1.
set -eu

here=$(CDPATH='' cd -P -- "$(dirname -- "$0")" && pwd -P)
events=$here/github-webhooks.jsonl.gz
topics=${TOPICS-topics}
topic=${TOPIC-webhooks}

step() { printf '\n== %s\n' "$*"; }
show() {
    printf '$ topics %s\n' "$*"
    "$topics" "$@"
}

step "Load 329 events: the payload is the data, the event's name is the tag"
show load "$topic" "$events" --data-field payload --tag-field event

step "Load them again: the topic holds them already, so nothing is appended"
show load "$topic" "$events" --data-field payload --tag-field event

step "Where the topic stands"
show info "$topic"

step "The first three records"
show read "$topic" --limit 3 --tags --table

step "The bytes are the file's bytes"
count=$("$topics" read "$topic" --json | wc -l | tr -d ' ')
read_back=$("$topics" read "$topic" --json | sed 's/^{"$seq":[0-9]*,"$ts":[0-9]*,"data":\(.*\)}$/\1/' | cksum)
in_file=$(gzip -dc "$events" | sed 's/^{"event":"[^"]*","payload":\(.*\)}$/\1/' | cksum)
printf '%s records; checksum read back: %s, in the file: %s\n' "$count" "$read_back" "$in_file"
[ "$read_back" = "$in_file" ]

step "Delete by tag: every event named push, then every event whose name starts with check_"
show delete "$topic" --tag push --yes
show delete "$topic" --tag-prefix check_ --yes

step "Delete by position: everything below seq 100"
show delete "$topic" --before 100 --yes

step "What is left"
show read "$topic" --limit 3 --tags --table
show info "$topic"

[ -n "${KEEP-}" ] || {
    step "Remove the topic"
    show rm "$topic" --yes
}
