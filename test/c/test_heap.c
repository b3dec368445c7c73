/* The heap against a sorted search, the wire helpers against their own writing and against bytes spelled out. */
#include "kmq_test.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "heap.h"
#include "wire.h"

/* ---- heap */

enum { OWNERS = 300 };

typedef struct owner {
    int name;
    kmq_heap_item item;
} owner;

/* the least of those that are in the heap, by looking at all of them */
static owner *least(owner **owners)
{
    owner *best = NULL;
    for (int i = 0; i < OWNERS; i++) {
        owner *o = owners[i];
        if (!kmq_heap_item_in(&o->item)) continue;
        if (best == NULL || o->item.deadline < best->item.deadline ||
            (o->item.deadline == best->item.deadline && o->item.sequence < best->item.sequence))
            best = o;
    }
    return best;
}

static void test_heap_model(void **state)
{
    kmq_rng rng = kmq_test_rng("heap model");
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    kmq_heap heap;
    owner *owners[OWNERS];
    uint64_t sequence = 0;
    size_t count = 0;
    (void)state;
    kmq_heap_init(&heap, &alloc);
    for (int i = 0; i < OWNERS; i++) {
        owners[i] = malloc(sizeof **owners);
        assert_non_null(owners[i]);
        owners[i]->name = i;
        kmq_heap_item_init(&owners[i]->item);
    }
    for (int64_t step = 0; step < kmq_test_scale(1000000); step++) {
        owner *o = owners[kmq_rng_below(&rng, OWNERS)];
        int64_t deadline = (int64_t)kmq_rng_below(&rng, 50) - 25; /* many ties */
        uint64_t grow = step / 5000 % 2 ? 2 : 6;                  /* fills and empties in turn */
        if (kmq_rng_chance(&rng, 1000)) deadline = kmq_rng_chance(&rng, 2) ? INT64_MAX : INT64_MIN;
        if (!kmq_heap_item_in(&o->item)) {
            if (kmq_rng_below(&rng, 8) >= grow) continue;
            o->item.deadline = deadline;
            o->item.sequence = sequence++;
            for (fail.fail_at = 1, fail.calls = 0; kmq_heap_push(&heap, &o->item) != KMQ_OK;
                 fail.fail_at++, fail.calls = 0) {
                assert_int_equal(kmq_heap_count(&heap), count);
                assert_false(kmq_heap_item_in(&o->item));
                kmq_heap_check(&heap);
            }
            fail.fail_at = 0;
            count++;
        } else if (kmq_rng_below(&rng, 8) >= grow) {
            owner *top = least(owners);
            if (kmq_rng_chance(&rng, 2)) {
                kmq_heap_item *item = kmq_heap_pop(&heap);
                assert_ptr_equal(KMQ_HEAP_OWNER(item, owner, item), top);
            } else {
                kmq_heap_remove(&heap, &o->item);
                assert_false(kmq_heap_item_in(&o->item));
            }
            count--;
        } else {
            kmq_heap_update(&heap, &o->item, deadline, sequence++);
        }
        if (step % 16 == 0) {
            owner *top = least(owners);
            assert_ptr_equal(kmq_heap_top(&heap), top != NULL ? &top->item : NULL);
            kmq_heap_check(&heap);
        }
        assert_int_equal(kmq_heap_count(&heap), count);
        assert_true(kmq_heap_bytes(&heap) <= (4 * count + 32) * sizeof(void *));
    }
    /* what is left comes out in order */
    for (owner *top; (top = least(owners)) != NULL;) assert_ptr_equal(kmq_heap_pop(&heap), &top->item);
    assert_null(kmq_heap_pop(&heap));
    kmq_heap_free(&heap);
    assert_int_equal(fail.blocks, 0);
    for (int i = 0; i < OWNERS; i++) free(owners[i]);
}

static void test_heap_reserve_and_move(void **state)
{
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    kmq_heap heap;
    kmq_heap_item items[100], moved;
    (void)state;
    kmq_heap_init(&heap, &alloc);
    assert_int_equal(kmq_heap_reserve(&heap, SIZE_MAX), KMQ_ENOMEM);
    assert_int_equal(kmq_heap_reserve(&heap, SIZE_MAX / 8 + 1), KMQ_ENOMEM);
    assert_int_equal(kmq_heap_reserve(&heap, 100), KMQ_OK);
    fail.fail_at = 1;
    fail.calls = 0;
    fail.forever = true;
    for (uint64_t i = 0; i < 100; i++) {
        kmq_heap_item_init(&items[i]);
        items[i].deadline = 7;
        items[i].sequence = 100 - i;
        assert_int_equal(kmq_heap_push(&heap, &items[i]), KMQ_OK);
    }
    moved = items[99];
    memset(&items[99], 0xff, sizeof items[99]);
    kmq_heap_moved(&heap, &moved);
    kmq_heap_check(&heap);
    assert_ptr_equal(kmq_heap_pop(&heap), &moved);
    assert_ptr_equal(kmq_heap_pop(&heap), &items[98]);
    kmq_heap_free(&heap);
    assert_int_equal(fail.blocks, 0);
}

/* ---- wire */

static void test_wire_fixed(void **state)
{
    uint8_t buf[8];
    (void)state;
    kmq_wire_put_u32(buf, 0x80000001u);
    assert_memory_equal(buf, "\x80\x00\x00\x01", 4);
    assert_true(kmq_wire_i32(kmq_wire_get_u32(buf)) == INT32_MIN + 1);
    kmq_wire_put_u64(buf, UINT64_MAX - 1);
    assert_memory_equal(buf, "\xff\xff\xff\xff\xff\xff\xff\xfe", 8);
    assert_true(kmq_wire_i64(kmq_wire_get_u64(buf)) == -2);
    assert_true(kmq_wire_i64(UINT64_C(1) << 63) == INT64_MIN);
    assert_true(kmq_wire_i64(INT64_MAX) == INT64_MAX);
    assert_true(kmq_wire_i32(INT32_MAX) == INT32_MAX);
    assert_true(kmq_wire_i32(UINT32_C(1) << 31) == INT32_MIN);
}

static void test_wire_uvar(void **state)
{
    static const struct {
        uint64_t value;
        const char *bytes;
        size_t n;
    } vectors[] = {{0, "\x00", 1},
                   {1, "\x01", 1},
                   {127, "\x7f", 1},
                   {128, "\x80\x01", 2},
                   {300, "\xac\x02", 2},
                   {16383, "\xff\x7f", 2},
                   {16384, "\x80\x80\x01", 3},
                   {INT64_MAX, "\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 9},
                   {UINT64_MAX, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 10}};
    static const struct {
        const char *bytes;
        size_t n;
    } bad[] = {{"", 0},
               {"\x80", 1},
               {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", 10},
               {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x81\x00", 11},
               {"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00", 11}};
    uint8_t buf[16];
    (void)state;
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        kmq_wire_writer writer;
        kmq_wire_reader reader;
        uint64_t v = 42;
        assert_int_equal(kmq_wire_uvar_bytes(vectors[i].value), vectors[i].n);
        kmq_wire_writer_init(&writer, buf, vectors[i].n - 1);
        assert_false(kmq_wire_write_uvar(&writer, vectors[i].value));
        assert_ptr_equal(writer.at, buf);
        kmq_wire_writer_init(&writer, buf, vectors[i].n);
        assert_true(kmq_wire_write_uvar(&writer, vectors[i].value));
        assert_int_equal(kmq_wire_room(&writer), 0);
        assert_memory_equal(buf, vectors[i].bytes, vectors[i].n);
        for (size_t cut = 0; cut < vectors[i].n; cut++) {
            kmq_wire_reader_init(&reader, buf, cut);
            assert_false(kmq_wire_read_uvar(&reader, &v));
            assert_int_equal(kmq_wire_left(&reader), cut);
        }
        kmq_wire_reader_init(&reader, buf, vectors[i].n);
        if (vectors[i].value > 0) assert_false(kmq_wire_read_uvar_max(&reader, vectors[i].value - 1, &v));
        assert_true(v == 42);
        assert_true(kmq_wire_read_uvar_max(&reader, vectors[i].value, &v));
        assert_true(v == vectors[i].value);
        assert_int_equal(kmq_wire_left(&reader), 0);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kmq_wire_reader reader;
        uint64_t v = 42;
        kmq_wire_reader_init(&reader, bad[i].bytes, bad[i].n);
        assert_false(kmq_wire_read_uvar(&reader, &v));
        assert_int_equal(kmq_wire_left(&reader), bad[i].n);
        assert_true(v == 42);
    }
    kmq_wire_reader padded;
    uint64_t v = 0;
    kmq_wire_reader_init(&padded, "\xac\x82\x00", 3);
    assert_true(kmq_wire_read_uvar(&padded, &v) && v == 300 && kmq_wire_left(&padded) == 0);
}

/* Random calls on random bytes that end at a page nobody may touch. */
static void test_wire_guard_page(void **state)
{
    kmq_rng rng = kmq_test_rng("wire guard page");
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *map = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (void)state;
    assert_true(map != MAP_FAILED);
    assert_int_equal(mprotect(map + page, page, PROT_NONE), 0);
    for (int64_t i = 0; i < kmq_test_scale(200000); i++) {
        size_t n = kmq_rng_below(&rng, 24);
        uint8_t *bytes = map + page - n, u8;
        const uint8_t *slice;
        uint32_t u32;
        uint64_t u64;
        kmq_wire_reader reader;
        kmq_wire_writer writer;
        bool more = true;
        kmq_wire_writer_init(&writer, bytes, n);
        while (more) switch (kmq_rng_below(&rng, 5)) {
            case 0: more = kmq_wire_write_u8(&writer, (uint8_t)kmq_rng_next(&rng)); break;
            case 1: more = kmq_wire_write_u32(&writer, (uint32_t)kmq_rng_next(&rng)); break;
            case 2: more = kmq_wire_write_u64(&writer, kmq_rng_next(&rng)); break;
            case 3: more = kmq_wire_write_uvar(&writer, kmq_rng_next(&rng) >> kmq_rng_below(&rng, 64)); break;
            default: more = kmq_wire_write_bytes(&writer, "abcdef", kmq_rng_below(&rng, 7)); break;
            }
        kmq_wire_reader_init(&reader, bytes, n);
        more = true;
        while (more) switch (kmq_rng_below(&rng, 5)) {
            case 0: more = kmq_wire_read_u8(&reader, &u8); break;
            case 1: more = kmq_wire_read_u32(&reader, &u32); break;
            case 2: more = kmq_wire_read_u64(&reader, &u64); break;
            case 3: more = kmq_wire_read_uvar(&reader, &u64); break;
            default: more = kmq_wire_read_bytes(&reader, 1 + kmq_rng_below(&rng, 6), &slice); break;
            }
        assert_true(reader.at <= reader.end && writer.at <= writer.end);
    }
    assert_int_equal(munmap(map, 2 * page), 0);
}

static void test_wire_empty(void **state)
{
    kmq_wire_reader reader;
    kmq_wire_writer writer;
    uint8_t byte;
    const uint8_t *slice;
    (void)state;
    kmq_wire_reader_init(&reader, NULL, 0);
    assert_false(kmq_wire_read_u8(&reader, &byte));
    assert_true(kmq_wire_read_bytes(&reader, 0, &slice));
    assert_non_null(slice);
    kmq_wire_writer_init(&writer, NULL, 0);
    assert_false(kmq_wire_write_u8(&writer, 1));
    assert_true(kmq_wire_write_bytes(&writer, NULL, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_heap_model),      cmocka_unit_test(test_heap_reserve_and_move),
        cmocka_unit_test(test_wire_fixed),      cmocka_unit_test(test_wire_uvar),
        cmocka_unit_test(test_wire_guard_page), cmocka_unit_test(test_wire_empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
