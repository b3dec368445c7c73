/* marks - records to the marker topic: written, reported, written again until they are durable. */
#include "engine.h"

#include <stdio.h>
#include <string.h>
#include "atoms.h"
#include "../kafka/failpoint.h"

enum { START_PAUSE_MS = 100, KMQ_BATCH = 100, START_MOST = 2 * MARKS_RUN, REPORTS = 256 };

static bool is_start(uint8_t type);

/* ------------------------------------------------------------------ in flight */
static void link_mark(engine *e, mark *m)
{
    m->seq = ++e->seq;
    m->handed_before = e->handed_total;
    m->prev = e->newest;
    m->next = NULL;
    if (e->newest)
        e->newest->next = m;
    else
        e->oldest = m;
    e->newest = m;
    m->part->in_flight++;
    if (is_start(m->type)) m->part->starts_in_flight++;
    if (marks_awaited(m->type, m->cause)) e->ends_in_flight++;
}

static void unlink_mark(engine *e, mark *m)
{
    if (m->prev)
        m->prev->next = m->next;
    else
        e->oldest = m->next;
    if (m->next)
        m->next->prev = m->prev;
    else
        e->newest = m->prev;
    m->part->in_flight--;
    if (is_start(m->type)) m->part->starts_in_flight--;
    if (marks_awaited(m->type, m->cause)) e->ends_in_flight--;
}

retry *marks_retry_new(uint8_t type, kmq_range range, int64_t delay_ms, uint8_t cause, uint8_t flags, const void *text,
                       size_t text_len)
{
    retry *r = enif_alloc(sizeof *r + text_len);
    if (!r) return NULL;
    *r = (retry){
        .range = range, .delay_ms = delay_ms, .type = type, .cause = cause, .flags = flags, .text_len = text_len};
    if (text_len) memcpy(r->text, text, text_len);
    return r;
}

void marks_retry_queue(part *p, retry *r)
{
    r->next = NULL;
    *p->retries_tail = r;
    p->retries_tail = &r->next;
}

bool marks_park(part *p, int64_t offset, int64_t due_ms)
{
    if (p->n_parks == p->cap_parks) {
        size_t cap = p->cap_parks ? 2 * p->cap_parks : 64;
        park *parks = enif_realloc(p->parks, cap * sizeof *parks);
        if (!parks) return false;
        p->parks = parks;
        p->cap_parks = cap;
    }
    p->parks[p->n_parks++] = (park){offset, due_ms};
    return true;
}

bool marks_awaited(uint8_t type, uint8_t cause)
{
    return type == KMQ_MARKER_END || type == KMQ_MARKER_RETRY || (type == KMQ_MARKER_EXTEND && cause == EXTEND_ASKED);
}

static bool is_start(uint8_t type) { return type == KMQ_MARKER_START || type == KMQ_MARKER_PARK; }

static int64_t count_offsets(const kmq_range *ranges, size_t n)
{
    int64_t count = 0;
    for (size_t i = 0; i < n; i++) count += ranges[i].hi - ranges[i].lo;
    return count;
}

/* What could not be written, or was not acknowledged, waits again where it came from. */
static void give_back(engine *e, part *p, uint8_t type, uint8_t cause, uint8_t flags, int64_t time_ms, const char *text,
                      size_t text_len, const kmq_range *ranges, size_t n, int64_t now)
{
    if (!n || p->forgotten) return;
    bool awaited = marks_awaited(type, cause);
    enif_mutex_lock(p->lock);
    switch (type) {
    case KMQ_MARKER_START:
        if (p->state != PART_RETIRED && kmq_ledger_start_failed(&p->ledger, ranges[0].lo, ranges[n - 1].hi))
            p->lame = true;
        p->start_pause_until = now + START_PAUSE_MS;
        p->unstarted = MARKS_RUN;
        break;
    case KMQ_MARKER_END:
        /* no memory: the lease ends instead, and the message comes again */
        if (kmq_ledger_end_failed(&p->ledger, (kmq_end_cause)cause, ranges, n) == KMQ_OK)
            atomic_fetch_add(&e->pending, count_offsets(ranges, n));
        break;
    case KMQ_MARKER_PARK:
        for (size_t i = 0; i < n && p->state != PART_RETIRED; i++)
            for (int64_t o = ranges[i].lo; o < ranges[i].hi; o++)
                if (!marks_park(p, o, time_ms)) p->lame = true;
        p->start_pause_until = now + START_PAUSE_MS;
        break;
    case KMQ_MARKER_EXTEND:
    case KMQ_MARKER_RETRY:
        for (size_t i = 0; i < n && awaited; i++) {
            retry *r = marks_retry_new(type, ranges[i], time_ms, cause, flags, text, text_len);
            if (!r) continue; /* its lease ends as a crash: counted, but not lost */
            marks_retry_queue(p, r);
            atomic_fetch_add(&e->pending, ranges[i].hi - ranges[i].lo);
        }
        break;
    default: break;
    }
    enif_mutex_unlock(p->lock);
    if (awaited) {
        if (e->flush_seq) e->flush_seq = UINT64_MAX; /* the flush waits for the second try, too */
        if (e->flush_due > now + START_PAUSE_MS) e->flush_due = now + START_PAUSE_MS;
    }
}

static void finish(engine *e, mark *m, int64_t now)
{
    part *p = m->part;
    unlink_mark(e, m);
    if (m->failed) {
        give_back(e, p, m->type, m->cause, m->flags, m->time_ms, m->text, m->text_len, m->ranges, m->n_ranges, now);
    } else if (m->type == KMQ_MARKER_START) {
        enif_mutex_lock(p->lock);
        if (p->state != PART_RETIRED && kmq_ledger_started(&p->ledger, m->ranges[0].lo, m->ranges[m->n_ranges - 1].hi))
            p->lame = true;
        enif_mutex_unlock(p->lock);
        uint64_t handed = e->handed_total - m->handed_before;
        e->handed_per_trip -= e->handed_per_trip / 8;
        if (e->start_reported < m->seq) e->start_reported = m->seq;
        if (e->handed_per_trip < handed) e->handed_per_trip = handed;
        (void)KMQ_FAILPOINT("start_handout");
        engine_wake_borrower(e);
    } else if (m->type == KMQ_MARKER_PARK) {
        int rc = KMQ_OK;
        enif_mutex_lock(p->lock);
        for (size_t i = 0; i < m->n_ranges && p->state != PART_RETIRED && !rc; i++)
            rc = kmq_ledger_parked(&p->ledger, m->ranges[i].lo, m->ranges[i].hi);
        if (rc) p->lame = true;
        enif_mutex_unlock(p->lock);
        engine_want_commit(e, now);
        engine_wake_borrower(e);
    }
    enif_free(m->text);
    enif_free(m);
}

static mark *new_mark(part *p, uint8_t type, const kmq_range *ranges, size_t n, int64_t time_ms, uint8_t cause,
                      uint8_t flags, const char *text, size_t text_len)
{
    mark *m = enif_alloc(sizeof *m + n * sizeof *ranges);
    if (!m) return NULL;
    *m = (mark){.part = p,
                .type = type,
                .time_ms = time_ms,
                .cause = cause,
                .flags = flags,
                .n_ranges = n,
                .text_len = text_len};
    memcpy(m->ranges, ranges, n * sizeof *ranges);
    if (text_len) {
        m->text = enif_alloc(text_len);
        if (!m->text) {
            enif_free(m);
            return NULL;
        }
        memcpy(m->text, text, text_len);
    }
    return m;
}

/* What a flush waits for, an acknowledgement being a promise: said once in a while. START is told when it changes (note_start). */
static void note_error(engine *e, const mark *m, const char *why, int64_t now)
{
    const part *p = m->part;
    engine_note *note = &e->end_note;
    if (m->type == KMQ_MARKER_START || !marks_awaited(m->type, m->cause)) return;
    if (note->text[0] || (note->at && now - note->at < 5000)) return;
    snprintf(note->text, sizeof note->text, "%s-%d, %lld messages from offset %lld on: %s", p->topic->marker_name,
             (int)p->partition, (long long)count_offsets(m->ranges, m->n_ranges), (long long)m->ranges[0].lo,
             why ? why : "failed");
    note->at = now;
    engine_notify_owner(e, 0);
}

/* START is what everything waits for; engine_poll tells it when it changes. */
static void note_start(engine *e, const mark *m, bool failed, int code, int64_t now)
{
    part *p = m->part;
    if (m->type != KMQ_MARKER_START) return;
    p->marker_error = !failed ? 0 : code ? code : -1;
    p->topic->written = !failed;
    if (failed) p->topic->failed_at = now;
    if (failed && !p->topic->told_error) engine_notify_owner(e, 0);
}

/* ------------------------------------------------------------------ writing */
/* false: not queued, because the local queue is full or (that is said) Kafka cannot take it. */
static bool send_marker(engine *e, mark *m, const uint8_t key[KMQ_MARKER_KEY_BYTES], const void *value,
                        size_t value_len, const kafka_header *headers, size_t n_headers)
{
    part *p = m->part;
    kafka_error err = {0};
    int rc = kafka_producer_send(e->producer, p->topic->marker, p->partition, key, KMQ_MARKER_KEY_BYTES, value,
                                 value_len, headers, n_headers, 0, m, &err);
    if (rc == KAFKA_EFULL) e->blocked = true;
    if (rc && rc != KAFKA_EFULL) {
        note_error(e, m, err.name, engine_now());
        note_start(e, m, true, err.code, engine_now());
    }
    return rc == KAFKA_OK;
}

/* One range record of as many leading ranges as fit. Returns how many; 0 = could not be queued. */
static size_t write_range_record(engine *e, part *p, uint8_t type, const kmq_range *ranges, size_t n, int64_t time_ms,
                                 uint8_t cause, uint8_t flags, const char *text, size_t text_len)
{
    kmq_marker_tlv tlv = {.text = text, .text_len = text_len, .instance = e->config.instance, .has_instance = true};
    size_t used = 0;
    int size = kmq_marker_encode(e->buffer, sizeof e->buffer, &p->topic->scope, (kmq_marker_type)type, ranges, n,
                                 time_ms, cause, flags, &tlv, &used);
    if (size <= 0 || !used) return 0;
    mark *m = new_mark(p, type, ranges, used, time_ms, cause, flags, text, text_len);
    if (!m) return 0;
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    kmq_marker_encode_key(key, p->partition, -1);
    m->left = 1;
    if (!send_marker(e, m, key, e->buffer, (size_t)size, NULL, 0)) {
        enif_free(m->text);
        enif_free(m);
        return 0;
    }
    link_mark(e, m);
    return used;
}

/* What a START's value has no room for. scratch holds what the headers point to. */
typedef struct kmq_scratch {
    char flags[1], due[24];
} kmq_scratch;

static size_t kmq_headers(const engine *e, uint8_t type, uint8_t cause, uint8_t flags, int64_t time_ms,
                          const char *text, size_t text_len, kmq_scratch *scratch, kafka_header out[4])
{
    size_t n = 0;
    out[n++] = (kafka_header){"kmq-group", e->config.group_id, strlen(e->config.group_id)};
    if (type == KMQ_MARKER_START || type == KMQ_MARKER_END) return n; /* a Java peer reads its key alone */
    if (type == KMQ_MARKER_EXTEND) cause = KMQ_CAUSE_EXTENDED;
    if (type == KMQ_MARKER_PARK) cause = KMQ_CAUSE_PARKED;
    const char *name = kmq_retry_cause_name(cause);
    out[n++] = (kafka_header){"kmq-cause", name, strlen(name)};
    if (type == KMQ_MARKER_PARK) {
        int len = snprintf(scratch->due, sizeof scratch->due, "%lld", (long long)time_ms);
        out[n++] = (kafka_header){"kmq-due", scratch->due, (size_t)len};
    } else if (type == KMQ_MARKER_RETRY) {
        scratch->flags[0] = (char)('0' + (flags & 7));
        out[n++] = (kafka_header){"kmq-flags", scratch->flags, 1};
        if (text_len) out[n++] = (kafka_header){"kmq-error", text, text_len};
    }
    return n;
}

/* The time in a START's value, from its own timestamp on. PARK names a time of day; a JVM tracker needs what is left of it. */
static int64_t kmq_time(const part *p, uint8_t type, int64_t time_ms, int64_t now)
{
    if (type != KMQ_MARKER_PARK) return time_ms;
    int64_t at = part_now(p, now);
    if (at == INT64_MIN) at = engine_wall_ms();
    return time_ms > at ? time_ms - at : 0;
}

/* kmq format: a record per offset, one mark for up to KMQ_BATCH of them. Returns the offsets written, from the front. */
static int64_t write_kmq_records(engine *e, part *p, uint8_t type, kmq_range *ranges, size_t n, int64_t time_ms,
                                 uint8_t cause, uint8_t flags, const char *text, size_t text_len, int64_t now)
{
    mark *m = new_mark(p, type, ranges, n, time_ms, cause, flags, text, text_len);
    if (!m) return 0;
    uint8_t key[KMQ_MARKER_KEY_BYTES], value[9];
    kmq_scratch scratch;
    size_t value_len = type == KMQ_MARKER_END ? 1 : 9;
    if (type == KMQ_MARKER_END)
        kmq_marker_encode_kmq_end(value);
    else
        kmq_marker_encode_kmq_start(value, kmq_time(p, type, time_ms, now));
    kafka_header headers[4];
    size_t n_headers = kmq_headers(e, type, cause, flags, time_ms, text, text_len, &scratch, headers);
    int64_t written = 0;
    size_t i = 0;
    bool full = false;
    for (; i < n && !full && written < KMQ_BATCH; i++) {
        int64_t o = ranges[i].lo;
        for (; o < ranges[i].hi && written < KMQ_BATCH; o++) {
            kmq_marker_encode_key(key, p->partition, o);
            if (!send_marker(e, m, key, value, value_len, headers, n_headers)) {
                full = true;
                break;
            }
            written++;
        }
        m->ranges[i].hi = o;
        if (o < ranges[i].hi) {
            i += o > ranges[i].lo;
            break;
        }
    }
    if (!written) {
        enif_free(m->text);
        enif_free(m);
        return 0;
    }
    m->n_ranges = i;
    m->left = (uint32_t)written;
    link_mark(e, m);
    return written;
}

/* A flush goes on with the next poll: its time is over. */
static void flush_again(engine *e, int64_t now)
{
    e->flush_due = now;
    if (e->flush_seq) e->flush_seq = UINT64_MAX;
    engine_notify_owner(e, 0);
}

/* Writes all of it, or as much as the producer's queue and the time slice take; the rest waits again. true = all written. */
static bool write_marks(engine *e, part *p, uint8_t type, kmq_range *ranges, size_t n, int64_t time_ms, uint8_t cause,
                        uint8_t flags, const char *text, size_t text_len, int64_t now)
{
    bool cut = false;
    for (bool first = true; n && e->producer && !e->producer_broken; first = false) {
        /* what is awaited may be many records: the rest of it with the next call */
        if ((cut = !first && marks_awaited(type, cause) && engine_slice_over(e))) break;
        size_t used = 0;
        if (e->config.format == FORMAT_RANGE) {
            used = write_range_record(e, p, type, ranges, n, time_ms, cause, flags, text, text_len);
            if (!used) break;
        } else {
            int64_t written = write_kmq_records(e, p, type, ranges, n < KMQ_BATCH ? n : KMQ_BATCH, time_ms, cause,
                                                flags, text, text_len, now);
            if (!written) break;
            while (used < n && written >= ranges[used].hi - ranges[used].lo)
                written -= ranges[used].hi - ranges[used].lo, used++;
            if (used < n) ranges[used].lo += written;
        }
        ranges += used;
        n -= used;
    }
    give_back(e, p, type, cause, flags, time_ms, text, text_len, ranges, n, now);
    if (cut) flush_again(e, now);
    return !n;
}

/* ------------------------------------------------------------------ what the engine asks for */
/* Delayed messages, those of one due time together. What cannot be written comes back into the list. */
static void write_parks(engine *e, part *p, int64_t now)
{
    enum { MOST = sizeof e->ranges / sizeof *e->ranges };
    park *parks = p->parks;
    size_t count = p->n_parks, i = 0;
    int64_t records = e->config.format == FORMAT_RANGE ? INT64_MAX : KMQ_BATCH;
    if (!count) return;
    p->parks = NULL;
    p->n_parks = p->cap_parks = 0;
    while (i < count) {
        const park *first = &parks[i];
        size_t n = 0;
        for (int64_t left = records; i < count && left && parks[i].due_ms == first->due_ms; i++, left--) {
            int64_t o = parks[i].offset;
            if (n && e->ranges[n - 1].hi == o)
                e->ranges[n - 1].hi++;
            else if (n == MOST || (n && o < e->ranges[n - 1].hi))
                break;
            else
                e->ranges[n++] = (kmq_range){o, o + 1};
        }
        (void)write_marks(e, p, KMQ_MARKER_PARK, e->ranges, n, first->due_ms, 0, 0, NULL, 0, now);
        if (engine_slice_over(e)) break;
    }
    if (i < count) engine_notify_owner(e, 0); /* the rest with the next poll */
    for (; i < count; i++)
        if (!marks_park(p, parks[i].offset, parks[i].due_ms)) p->lame = true;
    enif_free(parks);
}

void marks_start(engine *e, part *p, int64_t now)
{
    if (now < p->start_pause_until) return;
    p->unstarted = MARKS_RUN; /* until nothing is left */
    write_parks(e, p, now);
    int64_t most = e->config.format == FORMAT_RANGE ? START_MOST : KMQ_BATCH;
    int64_t lease = e->config.format == FORMAT_RANGE ? e->config.lease_ms : e->config.max_processing_ms;
    for (;;) {
        size_t n = 0;
        enif_mutex_lock(p->lock);
        int rc = kmq_ledger_take_start(&p->ledger, e->ranges, sizeof e->ranges / sizeof *e->ranges, most, &n);
        bool more = kmq_ledger_unstarted(&p->ledger);
        enif_mutex_unlock(p->lock);
        if (rc || (n && !write_marks(e, p, KMQ_MARKER_START, e->ranges, n, lease, 0, 0, NULL, 0, now))) return;
        if (!n || !more) {
            p->unstarted = 0;
            return;
        }
        if (engine_slice_over(e)) { /* the rest with the next poll, which also asks for STARTs */
            engine_notify_owner(e, 0);
            return;
        }
    }
}

static bool flush_ends(engine *e, part *p, int64_t now)
{
    for (uint8_t cause = 0; cause < (uint8_t)KMQ_END_CAUSES; cause++) {
        for (;;) {
            size_t n = 0;
            enif_mutex_lock(p->lock);
            int rc = kmq_ledger_take_end(&p->ledger, (kmq_end_cause)cause, e->ranges,
                                         sizeof e->ranges / sizeof *e->ranges, &n);
            enif_mutex_unlock(p->lock);
            if (rc || !n) break;
            atomic_fetch_sub(&e->pending, count_offsets(e->ranges, n));
            (void)KMQ_FAILPOINT("ack_end");
            if (!write_marks(e, p, KMQ_MARKER_END, e->ranges, n, 0, cause, 0, NULL, 0, now)) return false;
            if (engine_slice_over(e)) {
                flush_again(e, now);
                return false;
            }
        }
    }
    return true;
}

/* These were not looked at: they stand first again. */
static bool retries_left(engine *e, part *p, retry *list, int64_t now)
{
    retry **tail = &list;
    while (*tail) tail = &(*tail)->next;
    enif_mutex_lock(p->lock);
    *tail = p->retries;
    if (!p->retries) p->retries_tail = tail;
    p->retries = list;
    enif_mutex_unlock(p->lock);
    if (engine_slice_over(e)) flush_again(e, now);
    return false;
}

static bool flush_retries(engine *e, part *p, int64_t now)
{
    enif_mutex_lock(p->lock);
    retry *list = p->retries;
    p->retries = NULL;
    p->retries_tail = &p->retries;
    enif_mutex_unlock(p->lock);
    bool all = true;
    while (list) {
        if (!all || engine_slice_over(e)) return retries_left(e, p, list, now);
        retry *r = list;
        list = r->next;
        atomic_fetch_sub(&e->pending, r->range.hi - r->range.lo);
        kmq_range range = r->range;
        all = write_marks(e, p, r->type, &range, 1, r->delay_ms, r->cause, r->flags, r->text, r->text_len, now) && all;
        enif_free(r);
    }
    return all;
}

void marks_flush(engine *e, int64_t now)
{
    e->flush_due = INT64_MAX;
    atomic_store(&e->pending_since, now);
    for (int32_t i = e->first_slot; i < e->n_slots; i++) {
        part *p = e->slots[i];
        if (!p) continue;
        enif_mutex_lock(p->lock);
        bool wants = p->retries || kmq_ledger_ends(&p->ledger);
        enif_mutex_unlock(p->lock);
        if (wants && !(flush_ends(e, p, now) && flush_retries(e, p, now))) return;
    }
}

/* false: the slice is over, or the queue full; it goes on where it was. */
static bool renew_part(engine *e, part *p, int64_t now)
{
    for (;;) {
        size_t n = 0;
        int64_t cursor = e->renew_cursor;
        enif_mutex_lock(p->lock);
        int rc = kmq_ledger_held(&p->ledger, &cursor, e->ranges, sizeof e->ranges / sizeof *e->ranges, &n);
        enif_mutex_unlock(p->lock);
        if (rc || !n) {
            if (!rc) p->restart = false;
            return true;
        }
        uint8_t type = p->restart ? KMQ_MARKER_START : KMQ_MARKER_EXTEND;
        int64_t lease = e->config.format == FORMAT_RANGE ? e->config.lease_ms : e->config.max_processing_ms;
        if (!write_marks(e, p, type, e->ranges, n, lease, 0, 0, NULL, 0, now)) {
            e->renew_due = now + START_PAUSE_MS; /* soon again, long before the lease ends */
            return false;
        }
        e->renew_cursor = cursor;
        if (!engine_slice_over(e)) continue;
        e->renew_due = now;
        engine_notify_owner(e, 0);
        return false;
    }
}

void marks_renew(engine *e, int64_t now)
{
    if (!e->renew_round) {
        e->renew_round = now + e->config.lease_ms / 3;
        e->renew_slot = e->first_slot;
        e->renew_cursor = INT64_MIN;
        e->restart_asked = false;
    }
    bool renews = e->config.format == FORMAT_RANGE && engine_marks(e);
    for (; e->renew_slot < e->n_slots; e->renew_slot++) {
        part *p = e->slots[e->renew_slot];
        if (p && (renews || p->restart) && !renew_part(e, p, now)) return;
        e->renew_cursor = INT64_MIN;
    }
    e->renew_due = e->restart_asked ? now : e->renew_round;
    e->renew_round = 0;
}

/* In kmq format START carries the time limit itself, the tracker acts when it passes: here the ack only becomes a late one. */
void marks_timeouts(engine *e, int64_t now)
{
    for (int32_t i = e->first_slot; i < e->n_slots; i++) {
        part *p = e->slots[i];
        while (p) {
            size_t n = 0;
            enif_mutex_lock(p->lock);
            int rc = kmq_ledger_take_timeouts(&p->ledger, now, e->ranges, sizeof e->ranges / sizeof *e->ranges, &n);
            enif_mutex_unlock(p->lock);
            if (rc || !n) break;
            if (atomic_exchange(&p->full, false)) engine_wake_borrower(e);
            if (e->config.format == FORMAT_RANGE)
                write_marks(e, p, KMQ_MARKER_RETRY, e->ranges, n, 0, KMQ_RETRY_TIMEOUT, KMQ_FLAG_COUNTS, NULL, 0, now);
            if (engine_slice_over(e)) {
                engine_notify_owner(e, 0);
                return;
            }
        }
    }
}

/* What is open is late from here on, before its RETRY is written: an ack that came behind it and said ok would be of what others have. */
static void release_open(engine *e, part *p, int64_t now)
{
    for (;;) {
        size_t n = 0;
        enif_mutex_lock(p->lock);
        int rc = kmq_ledger_give_up(&p->ledger, e->ranges, sizeof e->ranges / sizeof *e->ranges, &n);
        enif_mutex_unlock(p->lock);
        if (rc || !n) return;
        write_marks(e, p, KMQ_MARKER_RETRY, e->ranges, n, 0, KMQ_RETRY_RELEASED, 0, NULL, 0, now);
    }
}

void marks_release(engine *e, part *p, bool open)
{
    int64_t cursor = INT64_MIN, now = engine_now();
    if (open) release_open(e, p, now);
    for (;;) { /* what waits; open is here only what there was no memory for */
        size_t n = 0;
        enif_mutex_lock(p->lock);
        int rc =
            open ? kmq_ledger_held(&p->ledger, &cursor, e->ranges, sizeof e->ranges / sizeof *e->ranges, &n)
                 : kmq_ledger_covered_waiting(&p->ledger, &cursor, e->ranges, sizeof e->ranges / sizeof *e->ranges, &n);
        enif_mutex_unlock(p->lock);
        if (rc || !n) return;
        write_marks(e, p, KMQ_MARKER_RETRY, e->ranges, n, 0, KMQ_RETRY_RELEASED, 0, NULL, 0, now);
    }
}

void marks_skip(engine *e, part *p, int64_t below)
{
    int64_t cursor = INT64_MIN, now = engine_now();
    for (;;) {
        size_t n = 0;
        enif_mutex_lock(p->lock);
        int rc = kmq_ledger_unseen(&p->ledger, below, &cursor, e->ranges, sizeof e->ranges / sizeof *e->ranges, &n);
        enif_mutex_unlock(p->lock);
        if (rc || !n) return;
        write_marks(e, p, KMQ_MARKER_END, e->ranges, n, 0, KMQ_END_DISCARDED, 0, NULL, 0, now);
    }
}

/* ------------------------------------------------------------------ reports */
/* The log's time when it took the record: by now the broker's clock is at least there. */
static void note_time(part *p, int64_t timestamp_ms, int64_t now)
{
    if (timestamp_ms <= 0) timestamp_ms = engine_wall_ms(); /* a log without times is stamped by its writers */
    if (timestamp_ms <= part_now(p, now)) return;
    p->log_ms = timestamp_ms;
    p->log_at = now;
}

/* Offsets that go back: the marker topic is another one now (deleted and made again, or cut off by an unclean election). What was open
 * in the old one is unknown to the new one, where a renewal opens nothing: all that is held is STARTed again. */
static void note_place(engine *e, part *p, int64_t offset, int64_t now)
{
    if (offset < 0) return;
    if (offset < p->marks_end) {
        p->restart = e->restart_asked = true;
        e->renew_due = now;
        engine_notify_owner(e, 0);
        snprintf(e->anew, sizeof e->anew, "%s-%d", p->topic->marker_name, (int)p->partition);
    }
    p->marks_end = offset;
}

void marks_reports(engine *e, int64_t now)
{
    kafka_report reports[REPORTS];
    size_t n;
    bool reported = false;
    if (!e->producer) return;
    do {
        n = kafka_producer_reports(e->producer, reports, REPORTS);
        reported = reported || n;
        for (size_t i = 0; i < n; i++) {
            mark *m = reports[i].opaque;
            bool failed = reports[i].error != 0;
            if (m->type == KMQ_MARKER_START && KMQ_FAILPOINT("start_report")) failed = true;
            note_start(e, m, failed, reports[i].error, now);
            if (failed) {
                note_error(e, m, reports[i].error_name, now);
                m->failed = true;
            } else {
                note_time(m->part, reports[i].timestamp_ms, now);
                note_place(e, m->part, reports[i].offset, now);
            }
            if (--m->left == 0) finish(e, m, now);
        }
    } while (n == REPORTS && !engine_slice_over(e));
    if (n == REPORTS) engine_notify_owner(e, 0); /* for what is left nobody is woken */
    if (reported && e->blocked) {                /* there is room again */
        e->blocked = false;
        if (e->flush_due != INT64_MAX) e->flush_due = now;
        engine_notify_owner(e, 0);
    }
    if (kafka_producer_fatal(e->producer, NULL)) e->producer_broken = true;
}

void marks_fail_all(engine *e, int64_t now)
{
    while (e->oldest) {
        e->oldest->failed = true;
        if (!e->oldest->part->marker_error) note_start(e, e->oldest, true, 0, now);
        finish(e, e->oldest, now);
    }
}

bool marks_settled(const engine *e)
{
    return !e->ends_in_flight && atomic_load(&((engine *)(uintptr_t)e)->pending) == 0;
}
