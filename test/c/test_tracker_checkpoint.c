/* What a checkpoint of a partition holds, and when one is written. No Kafka: without a producer the parts stay in memory. */
#include "kmq_test.h"

#include <stdlib.h>
#include <string.h>

#include "tracker.h"

enum { NOW_MS = 1000000 };
static const int64_t LOG_MS = INT64_C(1767225600000);

typedef struct scene {
    tracker t;
    tracker_queue queue;
    tracker_part *part;
    int64_t offset; /* of the next marker */
} scene;

static void begin(scene *s)
{
    memset(s, 0, sizeof *s);
    tracker_config_defaults(&s->t.config);
    s->t.mode = MODE_RUNNING;
    s->t.now_ms = NOW_MS;
    s->queue.topic = "orders";
    kmq_marker_scope_init(&s->queue.scope, "orders", 6, "g", 1);
    s->part = tracker_part_new(&s->t, &s->queue, 3);
    s->part->state = PART_READY;
    s->offset = 500;
}

static void end(scene *s)
{
    tracker_checkpoint_drop(s->part);
    assert_null(s->part->checkpoint);
    tracker_part_put(s->part);
}

/* A marker with one offset, or with every other one of n. */
static void mark(scene *s, kmq_marker_type type, int64_t offset, size_t n, int64_t time_ms, uint8_t cause)
{
    uint8_t bytes[512], key[KMQ_MARKER_KEY_BYTES];
    kmq_range ranges[16];
    kmq_marker marker;
    size_t used;
    for (size_t i = 0; i < n; i++) ranges[i] = (kmq_range){offset + 2 * (int64_t)i, offset + 2 * (int64_t)i + 1};
    int len = kmq_marker_encode(bytes, sizeof bytes, &s->queue.scope, type, ranges, n, time_ms, cause, 0, NULL, &used);
    assert_true(len > 0 && used == n);
    kmq_marker_encode_key(key, 3, -1);
    assert_int_equal(kmq_marker_decode(&s->queue.scope, 3, key, sizeof key, bytes, (size_t)len, NULL, 0, &marker),
                     KMQ_MARKER_OURS);
    assert_int_equal(kmq_lease_book_apply(&s->part->book, &marker, s->offset, LOG_MS), KMQ_OK);
    s->part->position = ++s->offset;
}

/* All parts, as a successor reads them. */
static size_t load(scene *s, kmq_lease_book *copy)
{
    kmq_alloc libc = kmq_alloc_libc();
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    const uint8_t *bytes;
    size_t n, parts = 0;
    uint64_t id = 0;
    assert_int_equal(kmq_lease_book_init(copy, &libc), KMQ_OK);
    kmq_marker_encode_key(key, 3, -1);
    for (; (bytes = tracker_checkpoint_part(s->part->checkpoint, parts, &n)); parts++) {
        kmq_marker marker;
        assert_int_equal(kmq_marker_decode(&s->queue.scope, 3, key, sizeof key, bytes, n, NULL, 0, &marker),
                         KMQ_MARKER_OURS);
        if (parts == 0) id = marker.tlv.instance;
        assert_int_equal(marker.type, KMQ_MARKER_CHECKPOINT);
        assert_int_equal(marker.part, parts);
        assert_int_equal(marker.as_of, s->part->position);
        assert_true(marker.tlv.has_instance && marker.tlv.instance == id);
        assert_int_equal(kmq_lease_book_load(copy, &marker), KMQ_OK);
    }
    return parts;
}

static int64_t plus(int64_t time_ms, int64_t shift_ms) { return time_ms == INT64_MAX ? time_ms : time_ms + shift_ms; }

static void same(const kmq_lease_book *a, const kmq_lease_book *b, int64_t shift_ms)
{
    int64_t at = INT64_MIN, bt = INT64_MIN, due_a, due_b;
    uint8_t cause_a, cause_b, flags_a, flags_b;
    kmq_range x, y;
    assert_int_equal(kmq_lease_book_open(a), kmq_lease_book_open(b));
    assert_int_equal(kmq_lease_book_log_time(a) + shift_ms, kmq_lease_book_log_time(b));
    while (kmq_lease_book_next(a, &at, &x, &due_a, &cause_a, &flags_a)) {
        assert_true(kmq_lease_book_next(b, &bt, &y, &due_b, &cause_b, &flags_b));
        assert_true(x.lo == y.lo && x.hi == y.hi && plus(due_a, shift_ms) == due_b && cause_a == cause_b &&
                    flags_a == flags_b);
    }
    assert_false(kmq_lease_book_next(b, &bt, &y, &due_b, &cause_b, &flags_b));
}

static void fill(scene *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        mark(s, i % 3 ? KMQ_MARKER_START : KMQ_MARKER_PARK, (int64_t)(40 * i), 1 + i % 9,
             i % 3 ? (int64_t)(1000 + 7 * i) : LOG_MS + (int64_t)i, 0);
    mark(s, KMQ_MARKER_START, 77777777, 1, INT64_MAX, 0); /* never due */
    mark(s, KMQ_MARKER_RETRY, 40, 1, 5, KMQ_RETRY_REJECTED);
    mark(s, KMQ_MARKER_END, 80, 1, 0, KMQ_END_ACK);
}

/* With a broker's clock that has jumped either way, deadlines go out as that clock has them. */
static void holds_what_is_open(void **state)
{
    (void)state;
    static const int64_t shifts[] = {0, 3600000, -3600000};
    for (size_t i = 0; i < sizeof shifts / sizeof shifts[0]; i++) {
        scene s;
        kmq_lease_book copy;
        kmq_due due[4];
        begin(&s);
        s.t.config.checkpoint_records = 1;
        fill(&s, 9000);
        s.part->clock.shift_ms = shifts[i];
        /* what is just being redelivered is open */
        assert_int_equal(kmq_lease_book_take_due(&s.part->book, LOG_MS + 3000, INT64_MAX, due, 4), 4);
        s.t.now_ms = NOW_MS + 10000;
        tracker_checkpoint_step(&s.t, s.part);
        assert_non_null(s.part->checkpoint);
        assert_true(load(&s, &copy) > 1);
        same(&s.part->book, &copy, shifts[i]);
        kmq_lease_book_free(&copy);
        end(&s);
    }
}

static bool written(scene *s, int64_t now_ms)
{
    s->t.now_ms = now_ms;
    tracker_checkpoint_step(&s->t, s->part);
    return s->part->checkpoint != NULL;
}

static void when(void **state)
{
    (void)state;
    scene s;
    begin(&s);
    s.t.config.checkpoint_records = 10;
    s.t.config.checkpoint_pause_ms = 5000;
    s.t.config.checkpoint_age_ms = 60000;
    assert_false(written(&s, NOW_MS + 100000)); /* nothing is open */
    s.part->assigned_ms = s.t.now_ms;
    int64_t from = s.t.now_ms;
    for (int64_t i = 0; i < 5; i++) mark(&s, KMQ_MARKER_START, i, 1, 1000, 0);
    assert_false(written(&s, from + 6000)); /* little behind it */
    for (int64_t i = 5; i < 20; i++) mark(&s, KMQ_MARKER_START, i, 1, 1000, 0);
    assert_true(written(&s, from + 7000));
    tracker_checkpoint_drop(s.part);
    assert_false(written(&s, from + 7500)); /* not at once again */
    assert_true(written(&s, from + 13000));
    tracker_checkpoint_drop(s.part);
    /* what was written is referred to, and counts from then on */
    s.part->reference = (tracker_reference){s.part->position, s.part->position, s.part->position, 1, 1};
    s.part->reference_ms = from + 13000;
    tracker_value value = tracker_part_commit_value(s.part);
    assert_ptr_equal(value.reference, &s.part->reference);
    assert_int_equal(value.offset, s.part->reference.as_of);
    mark(&s, KMQ_MARKER_START, 100, 1, 1000, 0);
    assert_false(written(&s, from + 40000));
    assert_true(written(&s, from + 73500)); /* old, though little is behind it */
    tracker_checkpoint_drop(s.part);
    /* what it held is settled: no reference, the next marker is what must be kept */
    for (int64_t i = 0; i < 20; i++) mark(&s, KMQ_MARKER_END, i, 1, 0, KMQ_END_ACK);
    mark(&s, KMQ_MARKER_START, 101, 1, 1000, 0);
    mark(&s, KMQ_MARKER_END, 100, 1, 0, KMQ_END_ACK);
    value = tracker_part_commit_value(s.part);
    assert_null(value.reference);
    assert_int_equal(value.offset, s.offset - 2);
    mark(&s, KMQ_MARKER_END, 101, 1, 0, KMQ_END_ACK);
    value = tracker_part_commit_value(s.part);
    assert_null(value.reference);
    assert_int_equal(value.offset, s.part->position);
    end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(holds_what_is_open),
        cmocka_unit_test(when),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
