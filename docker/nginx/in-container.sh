#!/bin/sh
# Starts nginx in the container of compose.yaml with the topics.conf of a host. It replaces the
# server's address and sends the logs to the container engine.
set -eu
sed -e 's|127[.]0[.]0[.]1:4000|topics:4000|' \
    -e 's|/var/log/nginx/topics[.]access[.]log|/dev/stdout|' \
    -e 's|/var/log/nginx/topics[.]error[.]log|/dev/stderr|' \
    /etc/nginx/topics.conf >/tmp/topics.conf
exec nginx -g 'daemon off;'
