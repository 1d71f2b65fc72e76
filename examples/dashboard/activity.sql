-- What happens in the repositories: counts by event, by repository and by time, and the newest events.
-- The tag of a record is the event's name, its data is the payload.

-- schema
CREATE TABLE events (event TEXT PRIMARY KEY, count INTEGER NOT NULL, last_ts INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE repos (repo TEXT PRIMARY KEY, count INTEGER NOT NULL, last_ts INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE senders (sender TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE intervals (start_ts INTEGER PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE recent (seq INTEGER PRIMARY KEY, ts INTEGER NOT NULL, event TEXT, action TEXT, repo TEXT, sender TEXT);

-- apply
INSERT INTO events VALUES (coalesce(:tag, 'none'), 1, :ts)
  ON CONFLICT (event) DO UPDATE SET count = count + 1, last_ts = excluded.last_ts;
INSERT INTO repos SELECT repo, 1, :ts FROM (SELECT :data ->> '$.repository.full_name' AS repo) WHERE repo IS NOT NULL
  ON CONFLICT (repo) DO UPDATE SET count = count + 1, last_ts = excluded.last_ts;
INSERT INTO senders SELECT sender, 1 FROM (SELECT :data ->> '$.sender.login' AS sender) WHERE sender IS NOT NULL
  ON CONFLICT (sender) DO UPDATE SET count = count + 1;
INSERT INTO intervals VALUES (:ts - :ts % 10000, 1) ON CONFLICT (start_ts) DO UPDATE SET count = count + 1;
INSERT INTO recent VALUES (:seq, :ts, :tag, :data ->> '$.action', :data ->> '$.repository.full_name', :data ->> '$.sender.login');
DELETE FROM recent WHERE seq <= :seq - 12;

-- query totals
SELECT (SELECT coalesce(sum(count), 0) FROM events) AS events, (SELECT count(*) FROM events) AS kinds,
  (SELECT count(*) FROM repos) AS repositories, (SELECT count(*) FROM senders) AS senders

-- query by_event
SELECT event, count, last_ts FROM events ORDER BY count DESC, event LIMIT 12

-- query by_repo
SELECT repo, count, last_ts FROM repos ORDER BY count DESC, repo LIMIT 8

-- query by_time
SELECT start_ts, count FROM intervals ORDER BY start_ts DESC LIMIT 60

-- query recent
SELECT seq, ts, event, action, repo, sender FROM recent ORDER BY seq DESC
