/* term and command: hostile frames are refused before ei sees them; what is right is decoded. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "command.h"
#include "term.h"

static void put_text(ei_x_buff *x, const char *text)
{
    assert_int_equal(ei_x_encode_binary(x, text, (int)strlen(text)), 0);
}

static void pair(ei_x_buff *x, const char *key, const char *value)
{
    assert_int_equal(ei_x_encode_atom(x, key), 0);
    put_text(x, value);
}

/* {7, configure, #{...}}; drop: a key to leave out */
static void configure(ei_x_buff *x, const char *drop)
{
    static const char *const names[] = {"props", "group", "tracker_group", "queues", "unknown", "rate", "format"};
    int pairs = 0;
    for (size_t i = 0; i < 7; i++) pairs += !drop || strcmp(drop, names[i]) != 0;
    x->index = 0;
    ei_x_encode_version(x);
    ei_x_encode_tuple_header(x, 3);
    ei_x_encode_long(x, 7);
    ei_x_encode_atom(x, "configure");
    ei_x_encode_map_header(x, pairs);
    for (size_t i = 0; i < 7; i++) {
        if (drop && strcmp(drop, names[i]) == 0) continue;
        ei_x_encode_atom(x, names[i]);
        switch (i) {
        case 0:
            ei_x_encode_list_header(x, 2);
            ei_x_encode_tuple_header(x, 2);
            put_text(x, "bootstrap.servers");
            put_text(x, "h:1");
            ei_x_encode_tuple_header(x, 2);
            put_text(x, "sasl.password");
            put_text(x, "");
            ei_x_encode_empty_list(x);
            break;
        case 1: put_text(x, "g"); break;
        case 2: put_text(x, "tg"); break;
        case 3:
            ei_x_encode_list_header(x, 1);
            ei_x_encode_map_header(x, 5);
            pair(x, "topic", "q");
            pair(x, "markers", "m");
            pair(x, "dead_letters", "d");
            pair(x, "copies", "q");
            pair(x, "future", "thing");
            ei_x_encode_empty_list(x);
            break;
        case 4:
            ei_x_encode_tuple_header(x, 1);
            ei_x_encode_double(x, 1.5);
            break;
        case 5: ei_x_encode_long(x, 123); break;
        case 6: ei_x_encode_atom(x, "kmq"); break;
        default: break;
        }
    }
}

static void a_configuration_is_read(void **state)
{
    (void)state;
    ei_x_buff x;
    ei_x_new(&x);
    configure(&x, NULL);
    tracker_command command;
    tracker_config config;
    assert_int_equal(tracker_command_decode((uint8_t *)x.buff, (size_t)x.index, &command), 0);
    assert_int_equal(command.id, 7);
    assert_int_equal(command.verb, TRACKER_CONFIGURE);
    assert_null(tracker_config_decode(&command, &config));
    assert_int_equal(config.n_props, 2);
    assert_string_equal(config.props[1].name, "sasl.password");
    assert_string_equal(config.props[1].value, "");
    assert_string_equal(config.group, "g");
    assert_string_equal(config.tracker_group, "tg");
    assert_string_equal(config.count_header, "kmq-redelivery-count");
    assert_int_equal(config.n_queues, 1);
    assert_string_equal(config.queues[0].dead_letters, "d");
    assert_int_equal(config.rate, 123);
    assert_int_equal(config.max_redeliveries, 3);
    assert_true(config.kmq_format);
    tracker_config_free(&config);
    for (size_t i = 0; i < 4; i++) {
        static const char *const needed[] = {"props", "group", "tracker_group", "queues"};
        configure(&x, needed[i]);
        assert_int_equal(tracker_command_decode((uint8_t *)x.buff, (size_t)x.index, &command), 0);
        assert_string_equal(tracker_config_decode(&command, &config), needed[i]);
    }
    ei_x_free(&x);
}

static void every_cut_and_every_flip_is_survived(void **state)
{
    (void)state;
    ei_x_buff x;
    ei_x_new(&x);
    configure(&x, NULL);
    size_t n = (size_t)x.index;
    tracker_command command;
    tracker_config config;
    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *copy = malloc(cut ? cut : 1); /* exact: ASan sees a byte too many */
        memcpy(copy, x.buff, cut);
        assert_int_equal(tracker_command_decode(copy, cut, &command), -1);
        free(copy);
    }
    uint32_t seed = 42;
    for (int round = 0; round < 300000; round++) {
        uint8_t *copy = malloc(n);
        memcpy(copy, x.buff, n);
        for (int k = 0; k < 1 + round % 3; k++) {
            seed = seed * 1664525u + 1013904223u;
            copy[(seed >> 8) % n] = (uint8_t)(seed >> 24);
        }
        if (tracker_command_decode(copy, n, &command) == 0 && command.verb == TRACKER_CONFIGURE &&
            !tracker_config_decode(&command, &config))
            tracker_config_free(&config);
        free(copy);
    }
    ei_x_free(&x);
}

static void nesting_is_bounded(void **state)
{
    (void)state;
    size_t n = 1 << 20;
    uint8_t *bytes = malloc(n);
    bytes[0] = 131;
    for (size_t i = 1; i + 2 <= n; i += 2) {
        bytes[i] = 104;
        bytes[i + 1] = 1;
    }
    assert_false(tracker_term_check(bytes, n - 1));
    for (size_t depth = 1; depth < 40; depth++) {
        for (size_t i = 0; i < depth; i++) bytes[1 + 2 * i] = 104, bytes[2 + 2 * i] = 1;
        bytes[1 + 2 * depth] = 106;
        assert_int_equal(tracker_term_check(bytes, 2 + 2 * depth), depth < TRACKER_TERM_DEPTH);
    }
    free(bytes);
}

static void lengths_that_lie_are_refused(void **state)
{
    (void)state;
    static const struct {
        uint8_t bytes[12];
        size_t n;
        bool good;
    } cases[] = {
        {{131, 106}, 2, true},
        {{131}, 1, false},
        {{130, 106}, 2, false},
        {{131, 106, 106}, 3, false},
        {{131, 109, 255, 255, 255, 255, 1}, 7, false},
        {{131, 109, 0, 0, 0, 1, 1}, 7, true},
        {{131, 108, 255, 255, 255, 255, 106}, 7, false},
        {{131, 116, 255, 255, 255, 255, 106}, 7, false},
        {{131, 105, 127, 255, 255, 255, 106}, 7, false},
        {{131, 110, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8}, 12, true},
        {{131, 110, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8}, 12, false},
        {{131, 119, 3, 'a', 'b'}, 5, false},
        {{131, 100, 255, 255, 'a'}, 5, false},
        {{131, 103, 1}, 3, false},
        {{131, 77, 0, 0, 0, 1, 8, 1}, 8, false},
        {{131, 97}, 2, false},
        {{131, 98, 0, 0, 0}, 5, false},
        {{131, 107, 0, 2, 1, 2}, 6, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint8_t *copy = malloc(cases[i].n);
        memcpy(copy, cases[i].bytes, cases[i].n);
        if (tracker_term_check(copy, cases[i].n) != cases[i].good) fail_msg("case %zu", i);
        free(copy);
    }
}

static void a_hundred_thousand_atoms(void **state)
{
    (void)state;
    ei_x_buff x;
    ei_x_new_with_version(&x);
    ei_x_encode_tuple_header(&x, 3);
    ei_x_encode_long(&x, 1);
    ei_x_encode_atom(&x, "nonsense");
    ei_x_encode_list_header(&x, 100000);
    for (int i = 0; i < 100000; i++) {
        char name[32];
        snprintf(name, sizeof name, "atom_%d", i);
        ei_x_encode_atom(&x, name);
    }
    ei_x_encode_empty_list(&x);
    tracker_command command;
    assert_int_equal(tracker_command_decode((uint8_t *)x.buff, (size_t)x.index, &command), 0);
    assert_int_equal(command.verb, TRACKER_UNKNOWN);
    ei_x_free(&x);
}

/* As a peer may write them: what is no number of ours is refused, whatever its size. */
static void numbers_of_every_size(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
        bool good;
    } cases[] = {
        {"a\377", 2, true},                                   /* 255 */
        {"b\177\377\377\377", 5, true},                       /* 2^31-1 */
        {"b\377\377\377\377", 5, false},                      /* -1 */
        {"n\10\0\0\0\0\0\0\0\0\10", 11, true},                /* 2^59 */
        {"n\10\0\377\377\377\377\377\377\377\177", 11, true}, /* 2^63-1 */
        {"n\10\0\0\0\0\0\0\0\0\200", 11, false},              /* 2^63 */
        {"n\10\1\0\0\0\0\0\0\0\10", 11, false},               /* -2^59 */
        {"n\11\0\0\0\0\0\0\0\0\0\1", 12, false},              /* 2^64 */
        {"o\0\0\0\11\0\0\0\0\0\0\0\0\0\1", 15, false},        /* the same, said at length */
        {"F\101\340\0\0\0\0\0\0", 9, false},                  /* 2^31 as a float */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tracker_command command;
        tracker_config config;
        ei_x_buff x;
        ei_x_new(&x);
        configure(&x, "rate");
        /* one pair more, at the end */
        int at = 0, version, arity, pairs;
        long long id;
        char atom[64];
        ei_decode_version(x.buff, &at, &version);
        ei_decode_tuple_header(x.buff, &at, &arity);
        ei_decode_longlong(x.buff, &at, &id);
        ei_decode_atom(x.buff, &at, atom);
        x.buff[at + 4]++; /* a map's size: 4 bytes behind its tag */
        ei_decode_map_header(x.buff, &at, &pairs);
        ei_x_encode_atom(&x, "rate");
        uint8_t *copy = malloc((size_t)x.index + cases[i].n); /* exact: ASan sees a byte too many */
        memcpy(copy, x.buff, (size_t)x.index);
        memcpy(copy + x.index, cases[i].bytes, cases[i].n);
        if (tracker_command_decode(copy, (size_t)x.index + cases[i].n, &command) == 0) {
            const char *wrong = tracker_config_decode(&command, &config);
            if (cases[i].good) {
                assert_null(wrong);
                assert_true(config.rate > 0);
                tracker_config_free(&config);
            } else {
                assert_string_equal(wrong, "rate");
            }
        } else {
            assert_false(cases[i].good);
        }
        free(copy);
        ei_x_free(&x);
    }
}

int main(void)
{
    ei_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_configuration_is_read),  cmocka_unit_test(every_cut_and_every_flip_is_survived),
        cmocka_unit_test(nesting_is_bounded),       cmocka_unit_test(lengths_that_lie_are_refused),
        cmocka_unit_test(a_hundred_thousand_atoms), cmocka_unit_test(numbers_of_every_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
