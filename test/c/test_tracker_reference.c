/* References of commits to checkpoints, and the search for the newest whole one. */
#include "kmq_test.h"

#include <inttypes.h>
#include <string.h>

#include "reference.h"

static void there_and_back(void **state)
{
    (void)state;
    tracker_reference in[] = {{0, 0, 0, 1, 0},
                              {100, 120, 140, 21, UINT64_MAX},
                              {INT64_MAX - 2, INT64_MAX - 1, INT64_MAX, 2, 77},
                              {5, 5, INT64_MAX, UINT32_MAX, 1}},
                      out;
    tracker_witness witnesses[] = {{-1, 0}, {0, 0}, {99, INT64_C(1767225600000)}, {INT64_MAX, INT64_MIN}}, witness;
    enum { REFERENCES = sizeof in / sizeof in[0], WITNESSES = sizeof witnesses / sizeof witnesses[0] };
    char metadata[TRACKER_REFERENCE_BYTES];
    for (size_t k = 0; k < WITNESSES; k++) {
        for (size_t i = 0; i < REFERENCES; i++) {
            tracker_reference_print(&in[i], witnesses[k], metadata);
            assert_true(strlen(metadata) < sizeof metadata - 1);
            for (const char *c = metadata; *c; c++) assert_true(*c >= ' ' && *c < 0x7f);
            assert_int_equal(tracker_reference_parse(metadata, in[i].as_of, &out, &witness), REFERENCE_OURS);
            assert_true(in[i].as_of == out.as_of && in[i].first == out.first && in[i].last == out.last &&
                        in[i].parts == out.parts && in[i].id == out.id);
            assert_true(witness.offset == witnesses[k].offset && witness.timestamp_ms == witnesses[k].timestamp_ms);
        }
        tracker_reference_print(NULL, witnesses[k], metadata);
        assert_int_equal(metadata[0] == 0, k == 0);
        assert_int_equal(tracker_reference_parse(metadata, 7, &out, &witness), REFERENCE_NONE);
        assert_true(witness.offset == witnesses[k].offset && witness.timestamp_ms == witnesses[k].timestamp_ms);
    }
}

static void odd_metadata(void **state)
{
    (void)state;
    static const struct {
        const char *metadata;
        int64_t as_of;
        tracker_reference_kind kind;
        int64_t witness; /* its offset; 0 = none */
    } cases[] = {
        {NULL, 1, REFERENCE_NONE, 0},
        {"", 1, REFERENCE_NONE, 0},
        {"another tool's", 1, REFERENCE_NONE, 0},
        {"at1 5 6", 1, REFERENCE_NONE, 5},
        {"at1 5", 1, REFERENCE_NONE, 0},
        {"at1 5 6 7", 1, REFERENCE_NONE, 0},
        {"at1 -5 6", 1, REFERENCE_NONE, 0},
        {"at2 5 6", 1, REFERENCE_NONE, 0},
        {"ck1 5 6 2 a 5", 5, REFERENCE_BROKEN, 0},
        {"ck1 5 6 2 a 4 6 7", 5, REFERENCE_BROKEN, 0},
        {"ck1 5 6 2 a 4 6", 5, REFERENCE_OURS, 4},
        {"ck2 1 2 3 4", 1, REFERENCE_NEWER, 0},
        {"ck", 1, REFERENCE_NEWER, 0},
        {"ck1 ", 1, REFERENCE_BROKEN, 0},
        {"ck1 broken", 1, REFERENCE_BROKEN, 0},
        {"ck1 1 2 3", 1, REFERENCE_BROKEN, 0},
        {"ck1 5 6 2 a x", 1, REFERENCE_BROKEN, 0},
        {"ck1 5 6 3 a", 1, REFERENCE_BROKEN, 0}, /* three parts in two records */
        {"ck1 5 4 1 a", 1, REFERENCE_BROKEN, 0},
        {"ck1 5 6 0 a", 1, REFERENCE_BROKEN, 0},
        {"ck1 5 6 2 a", 6, REFERENCE_BROKEN, 0}, /* written before as_of */
        {"ck1 5 6 2 a", -1, REFERENCE_BROKEN, 0},
        {"ck1 5 6 2 a", 5, REFERENCE_OURS, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tracker_reference out;
        tracker_witness witness;
        assert_int_equal(tracker_reference_parse(cases[i].metadata, cases[i].as_of, &out, &witness), cases[i].kind);
        assert_int_equal(witness.offset, cases[i].witness ? cases[i].witness : -1);
        assert_int_equal(out.as_of, cases[i].kind == REFERENCE_OURS ? cases[i].as_of : -1);
    }
}

static void part(tracker_finder *finder, int64_t offset, uint64_t id, int64_t as_of, uint32_t number, uint32_t parts)
{
    kmq_marker marker = {.type = KMQ_MARKER_CHECKPOINT, .as_of = as_of, .part = number, .parts = parts};
    marker.tlv.instance = id;
    marker.tlv.has_instance = true;
    tracker_finder_feed(finder, &marker, offset);
}

static void the_newest_whole_one(void **state)
{
    (void)state;
    tracker_finder finder;
    tracker_finder_init(&finder, 100);
    assert_int_equal(finder.best.as_of, -1);
    part(&finder, 110, 1, 99, 0, 1); /* its as_of is not in the log any more */
    assert_int_equal(finder.best.as_of, -1);
    part(&finder, 120, 2, 105, 0, 2);
    part(&finder, 121, 3, 105, 0, 2); /* two trackers at once, as of the same marker */
    part(&finder, 122, 2, 105, 1, 2);
    assert_int_equal(finder.best.id, 2);
    assert_int_equal(finder.best.first, 120);
    assert_int_equal(finder.best.last, 122);
    part(&finder, 123, 3, 105, 1, 2); /* no newer */
    assert_int_equal(finder.best.id, 2);
    part(&finder, 130, 4, 124, 0, 3);
    part(&finder, 131, 4, 124, 2, 3); /* a part is missing */
    part(&finder, 132, 4, 124, 1, 3);
    assert_int_equal(finder.best.id, 2);
    part(&finder, 140, 5, 133, 0, 1);
    assert_int_equal(finder.best.id, 5);
    part(&finder, 141, 6, 120, 0, 1); /* a zombie's: older than the best */
    assert_int_equal(finder.best.id, 5);
    part(&finder, 142, 7, 143, 0, 1); /* as of what is yet to come: nonsense */
    assert_int_equal(finder.best.id, 5);
}

/* Any mixture of any number of writers, some of which die: what is found is one that is whole. */
static void any_mixture(void **state)
{
    (void)state;
    enum { WRITERS = 12, PARTS = 6 };
    kmq_rng rng = kmq_test_rng("any_mixture");
    for (int round = 0; round < 2000; round++) {
        tracker_finder finder;
        uint32_t next[WRITERS] = {0}, parts[WRITERS], dies[WRITERS];
        int64_t as_of[WRITERS], first[WRITERS], last[WRITERS];
        tracker_finder_init(&finder, 0);
        for (int w = 0; w < WRITERS; w++) {
            parts[w] = 1 + (uint32_t)(kmq_rng_below(&rng, PARTS));
            dies[w] = kmq_rng_below(&rng, 3) == 0 ? (uint32_t)kmq_rng_below(&rng, parts[w]) : parts[w];
            as_of[w] = (int64_t)(kmq_rng_below(&rng, 40));
        }
        for (int64_t offset = 40; offset < 40 + 200; offset++) {
            size_t w = kmq_rng_below(&rng, WRITERS);
            if (next[w] >= dies[w]) continue;
            if (next[w] == 0) first[w] = offset;
            last[w] = offset;
            part(&finder, offset, w + 1, as_of[w], next[w]++, parts[w]);
        }
        if (finder.best.as_of < 0) continue;
        size_t w = finder.best.id - 1;
        assert_true(next[w] == parts[w] && finder.best.first == first[w] && finder.best.last == last[w]);
        assert_true(finder.best.as_of == as_of[w]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(there_and_back),
        cmocka_unit_test(odd_metadata),
        cmocka_unit_test(the_newest_whole_one),
        cmocka_unit_test(any_mixture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
