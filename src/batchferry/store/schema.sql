-- The local index. A cache: made anew at every start, so there are no migrations.

-- Accepted records until they are settled. "packed" is MessagePack of [key, headers, t0_ms, deadline_ms, digest of
-- the batch key]: read and written only as a whole. No index on custom_id: it would cost more than the insert
-- itself, and the one question about it is asked of a whole batch at a time.
CREATE TABLE rows (
    partition INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    packed BLOB NOT NULL,
    PRIMARY KEY (partition, offset)
) WITHOUT ROWID;

-- What the batch machine shows of itself. Instants are ISO 8601 in UTC with microseconds, so text sorts as time.
CREATE TABLE batch_jobs (
    batch_id TEXT PRIMARY KEY,
    platform_batch_id TEXT,
    state TEXT,
    provider_status TEXT,
    account TEXT,
    endpoint TEXT,
    model TEXT,
    completion_window TEXT,
    slice TEXT,
    partitions TEXT, -- JSON
    rows INTEGER,
    bytes INTEGER,
    tokens INTEGER,
    seal_reason TEXT,
    input_file_id TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    created_at TEXT,
    sealed_at TEXT,
    submitted_at TEXT,
    finalized_at TEXT,
    next_poll_at TEXT,
    total_requests INTEGER,
    succeeded INTEGER,
    failed INTEGER,
    missing INTEGER,
    duplicate INTEGER,
    waiting_s REAL, -- how long the oldest row had waited when the batch was sealed
    detail TEXT -- JSON
) WITHOUT ROWID;

CREATE INDEX batch_jobs_finalized ON batch_jobs (finalized_at) WHERE finalized_at IS NOT NULL;

CREATE TABLE batch_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id TEXT NOT NULL,
    at TEXT NOT NULL,
    event TEXT NOT NULL,
    from_state TEXT,
    to_state TEXT,
    detail TEXT -- JSON
);

CREATE INDEX batch_events_of_batch ON batch_events (batch_id, seq);

CREATE TRIGGER batch_events_go_with_their_batch AFTER DELETE ON batch_jobs
BEGIN
    DELETE FROM batch_events WHERE batch_id = OLD.batch_id;
END;
