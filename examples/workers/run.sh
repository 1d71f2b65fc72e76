#!/bin/sh
# Runs the webhook events as jobs of three workers, and kills (-9) the third worker repeatedly.
# It needs a running server (TOPICS_URL, default http://127.0.0.1:4000) and a python that has
# topics-server installed (PYTHON names it, default python3). It removes its queue at the end.
set -eu

here=$(CDPATH='' cd -P -- "$(dirname -- "$0")" && pwd -P)
python=${PYTHON-python3}
url=${TOPICS_URL-http://127.0.0.1:4000}
queue=${QUEUE-webhook-jobs}
results=$(mktemp -d)
topics() { "$python" -m topics_server "$@" --url "$url"; }
left() { topics queue "$queue" --json | sed 's/.*"count":\([0-9]*\).*/\1/'; }
work() { "$python" "$here/worker.py" "$url" "$queue" "$results" "$1" & }

workers=
victim=
finish() {
    for pid in $workers $victim; do kill "$pid" 2>/dev/null || :; done
    wait
    rm -rf "$results"
}
trap finish EXIT
trap 'exit 1' INT TERM

"$python" "$here/enqueue.py" "$url" "$queue"
work ada
workers=$!
work ben
workers="$workers $!"
kills=0
while [ "$(left)" -gt 0 ]; do
    work cyd
    victim=$!
    sleep "1.$((kills % 5))"
    kill -9 "$victim"
    wait "$victim" 2>/dev/null || :
    victim=
    kills=$((kills + 1))
done
for pid in $workers; do kill "$pid"; done
wait
workers=

topics queue "$queue" --table
done_once=$(find "$results" -name '[0-9]*' -type f | wc -l | tr -d ' ')
begun=$(cat "$results"/*.log | grep -c '^begun')
again=$(cat "$results"/*.log | sed -n 's/^done \([0-9]*\) .*/\1/p' | sort | uniq -d | wc -l | tr -d ' ')
dropped=$(gzip -dc "$here/../webhooks/github-webhooks.jsonl.gz" | grep -c '^{"event":"ping"')
printf '%s kills; %s results and %s dropped jobs of 329; %s handlers begun, %s jobs done twice\n' \
    "$kills" "$done_once" "$dropped" "$begun" "$again"
grep -h ^stopped "$results"/*.log
topics rm "$queue" --yes --json >/dev/null
[ $((done_once + dropped)) -eq 329 ]
