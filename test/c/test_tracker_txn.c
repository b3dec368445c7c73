/* What transactions need that is no Kafka: ENDs as records, and what waits to go out. */
#include "kmq_test.h"

#include <stdlib.h>
#include <string.h>

#include "tracker.h"

enum { RECORDS = 16 };

typedef struct collected {
    kmq_marker_scope scope;
    size_t n;
    struct {
        int64_t key_offset, copy_offset;
        int64_t lo, hi; /* of what it ends */
        size_t ranges;
        uint8_t cause;
    } records[RECORDS];
} collected;

static void collect(void *ctx, int64_t key_offset, const uint8_t *bytes, size_t n)
{
    collected *c = ctx;
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    kmq_marker marker;
    kmq_marker_cursor cursor;
    kmq_range range;
    assert_true(c->n < RECORDS);
    kmq_marker_encode_key(key, 3, key_offset);
    assert_int_equal(kmq_marker_decode(&c->scope, 3, key, sizeof key, bytes, n, NULL, 0, &marker), KMQ_MARKER_OURS);
    assert_int_equal(marker.type, KMQ_MARKER_END);
    size_t i = c->n++;
    c->records[i].key_offset = key_offset;
    c->records[i].copy_offset = marker.tlv.has_copy_offset ? marker.tlv.copy_offset : -1;
    c->records[i].cause = marker.cause;
    if (key_offset >= 0) return;
    kmq_marker_set_begin(&marker.set, &cursor);
    while (kmq_marker_set_next(&cursor, &range)) {
        if (c->records[i].ranges++ == 0) c->records[i].lo = range.lo;
        c->records[i].hi = range.hi;
    }
}

static void ends_follow_their_copies(void **state)
{
    (void)state;
    collected c = {.n = 0};
    kmq_marker_scope_init(&c.scope, "orders", 6, "g", 1);
    /* 5, 6 and 9 were copied to 100..102, 10 to 200; two dead letters; one that had no copy */
    tracker_end ends[] = {{10, 200, KMQ_END_REDELIVERED},  {6, 101, KMQ_END_REDELIVERED},
                          {7, 300, KMQ_END_DEAD_LETTERED}, {5, 100, KMQ_END_REDELIVERED},
                          {8, 301, KMQ_END_DEAD_LETTERED}, {9, 102, KMQ_END_REDELIVERED},
                          {11, -1, KMQ_END_GONE}};
    tracker_ends_encode(&c.scope, false, ends, sizeof ends / sizeof ends[0], collect, &c);
    assert_int_equal(c.n, 4);
    assert_int_equal(c.records[0].cause, KMQ_END_REDELIVERED);
    assert_int_equal(c.records[0].copy_offset, 100);
    assert_int_equal(c.records[0].lo, 5);
    assert_int_equal(c.records[0].hi, 10);
    assert_int_equal(c.records[0].ranges, 2);
    assert_int_equal(c.records[1].copy_offset, 200);
    assert_int_equal(c.records[1].lo, 10);
    assert_int_equal(c.records[2].cause, KMQ_END_DEAD_LETTERED);
    assert_int_equal(c.records[2].copy_offset, 300);
    assert_int_equal(c.records[2].hi, 9);
    assert_int_equal(c.records[3].cause, KMQ_END_GONE);
    assert_int_equal(c.records[3].copy_offset, -1);
}

static void ends_of_the_other_format(void **state)
{
    (void)state;
    collected c = {.n = 0};
    kmq_marker_scope_init(&c.scope, "orders", 6, "g", 1);
    tracker_end ends[] = {{6, 101, KMQ_END_REDELIVERED}, {5, 100, KMQ_END_REDELIVERED}};
    tracker_ends_encode(&c.scope, true, ends, 2, collect, &c);
    assert_int_equal(c.n, 2);
    assert_int_equal(c.records[0].key_offset, 5);
    assert_int_equal(c.records[1].key_offset, 6);
    c.n = 0;
    tracker_ends_encode(&c.scope, true, ends, 0, collect, &c);
    assert_int_equal(c.n, 0);
}

/* A partition with one START, due at once, taken from its book. */
typedef struct scene {
    tracker t;
    tracker_queue queue;
    tracker_part *part;
} scene;

static tracker_item *begin(scene *s, bool dead)
{
    static const int64_t log_ms = INT64_C(1767225600000);
    uint8_t bytes[64], key[KMQ_MARKER_KEY_BYTES];
    kmq_range one = {7, 8};
    kmq_marker marker;
    kmq_due due;
    size_t used;
    memset(s, 0, sizeof *s);
    tracker_config_defaults(&s->t.config);
    s->t.config.transactional = true;
    s->t.mode = MODE_RUNNING;
    s->t.now_ms = 1000;
    s->queue.topic = "orders";
    kmq_marker_scope_init(&s->queue.scope, "orders", 6, "g", 1);
    s->part = tracker_part_new(&s->t, &s->queue, 3);
    s->part->state = PART_READY;
    s->t.parts = s->part;
    int len = kmq_marker_encode(bytes, sizeof bytes, &s->queue.scope, KMQ_MARKER_START, &one, 1, 0, 0, 0, NULL, &used);
    kmq_marker_encode_key(key, 3, -1);
    assert_int_equal(kmq_marker_decode(&s->queue.scope, 3, key, sizeof key, bytes, (size_t)len, NULL, 0, &marker),
                     KMQ_MARKER_OURS);
    assert_int_equal(kmq_lease_book_apply(&s->part->book, &marker, 40, log_ms), KMQ_OK);
    assert_int_equal(kmq_lease_book_take_due(&s->part->book, log_ms, INT64_MAX, &due, 1), 1);
    tracker_item *item = tracker_alloc(sizeof *item);
    item->part = s->part;
    item->offset = 7;
    item->fate.dead = dead;
    item->target = dead ? &s->queue.dead_letters : &s->queue.copies;
    tracker_part_keep(s->part);
    s->part->n_active = s->t.n_active = 1;
    return item;
}

static void what_waits_is_counted_and_goes_back(void **state)
{
    (void)state;
    scene s;
    for (int dead = 0; dead < 2; dead++) {
        tracker_item *item = begin(&s, dead);
        tracker_txn_add(&s.t, item);
        assert_int_equal(s.t.n_copies, 1);
        assert_int_equal(item->target->in_flight, 1);
        assert_int_equal(kmq_lease_book_in_flight(&s.part->book), 1);
        tracker_txn_drop(&s.t);
        assert_int_equal(s.t.n_copies, 0);
        assert_int_equal(s.queue.copies.in_flight + s.queue.dead_letters.in_flight, 0);
        assert_int_equal(kmq_lease_book_in_flight(&s.part->book), 0); /* due again */
        assert_int_equal(kmq_lease_book_open(&s.part->book), 1);
        assert_int_equal(s.t.n_active, 0);
        tracker_part_put(s.part);
    }
}

/* Nothing is taken from the book, and no CLOCK is sent for it, before its id is ours. */
static void nothing_is_decided_without_a_producer(void **state)
{
    (void)state;
    scene s;
    tracker_item *item = begin(&s, false);
    assert_false(tracker_txn_may_take(&s.t, s.part));
    assert_false(tracker_txn_has(s.part));
    assert_false(s.part->txn.wanted);
    tracker_item_back(&s.t, item);
    s.part->barrier = BARRIER_WANTED;
    s.part->warm = true;
    s.part->asked_ms = s.t.now_ms; /* the group's commit is known */
    tracker_part_step(&s.t, s.part);
    assert_int_equal(s.part->barrier, BARRIER_WANTED);
    assert_true(s.part->txn.wanted);
    /* and it does not ask to be called at once, again and again */
    assert_true(tracker_part_wait(&s.t, s.part) > 0);
    tracker_part_put(s.part);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ends_follow_their_copies),
        cmocka_unit_test(ends_of_the_other_format),
        cmocka_unit_test(what_waits_is_counted_and_goes_back),
        cmocka_unit_test(nothing_is_decided_without_a_producer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
