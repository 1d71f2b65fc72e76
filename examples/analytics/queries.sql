-- Spark SQL over the log. `spark-sql` and notebooks know the source once the package is installed;
-- replace the path. Days and hours are those of the session's zone: set it to UTC.
SET TIME ZONE 'UTC';

-- A table of the catalog. Columns are named by the option, not in parentheses; without `data` and
-- `meta` no payload is read. DROP TABLE leaves the data directory as it is.
CREATE TABLE events USING topics
OPTIONS (path '/srv/topics-data', columns 'topic,seq,ts,tag,node,bytes');

-- A view of this session, here with payloads by a schema.
CREATE TEMPORARY VIEW orders USING topics
OPTIONS (path '/srv/topics-data', topics 'orders.*', payloadSchema 'id long, amount double');

-- name: topic_volume
SELECT topic, window.start AS start, count(*) AS records, sum(bytes) AS bytes,
       count(*) / 3600 AS records_per_s,
       percentile(bytes, 0.5) AS p50, percentile(bytes, 0.95) AS p95,
       percentile(bytes, 0.99) AS p99, max(bytes) AS bytes_max
FROM events
GROUP BY topic, window(ts, '1 hour')
ORDER BY topic, start;

-- name: tag_activity
SELECT * FROM (
  SELECT topic, tag, count(*) AS records, min(ts) AS first_seen, max(ts) AS last_seen,
         max(seq) AS last_seq, count(*) / sum(count(*)) OVER (PARTITION BY topic) AS share
  FROM events
  GROUP BY topic, tag)
WHERE tag IS NOT NULL
ORDER BY topic, records DESC, tag;

-- name: sessions
SELECT topic, node AS who, min(ts) AS start, max(ts) AS end, count(*) AS records,
       unix_millis(max(ts)) - unix_millis(min(ts)) AS duration_ms
FROM events
WHERE node IS NOT NULL
GROUP BY topic, node, session_window(ts, '30 minutes')
ORDER BY topic, who, start;

-- name: revenue
SELECT topic, date_trunc('day', ts) AS day, sum(data.amount) AS amount
FROM orders
GROUP BY ALL
ORDER BY ALL;
