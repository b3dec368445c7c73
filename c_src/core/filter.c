/* kmq_filter - see filter.h for the clauses and the automaton. */
#include "filter.h"

#include <assert.h>
#include <string.h>

enum { SET_WORDS = KMQ_FILTER_STATES / 64 };

struct kmq_filter_clause {
    kmq_filter_clause *next;
    size_t name_len, value_len;
    char bytes[]; /* name, then value; a tag is a name */
};

/* State s waits for words[s], or for any word, or is a # and passes; text NULL in the last two and in the end state. */
struct kmq_filter_word {
    char *text;
    size_t len;
};

/* ---- building */

void kmq_filter_init(kmq_filter *filter, const kmq_alloc *alloc) { *filter = (kmq_filter){.alloc = *alloc}; }

static void *mem(kmq_filter *filter, void *ptr, size_t bytes)
{
    return filter->alloc.realloc(filter->alloc.ctx, ptr, bytes);
}

static void free_clauses(kmq_filter *filter, kmq_filter_clause *clause)
{
    while (clause != NULL) {
        kmq_filter_clause *next = clause->next;
        mem(filter, clause, 0);
        clause = next;
    }
}

void kmq_filter_free(kmq_filter *filter)
{
    free_clauses(filter, filter->tags);
    free_clauses(filter, filter->headers);
    for (size_t i = 0; i < filter->n_states; i++) mem(filter, filter->words[i].text, 0);
    mem(filter, filter->words, 0);
    kmq_filter_init(filter, &(kmq_alloc){filter->alloc.realloc, filter->alloc.ctx});
}

static int add_clause(kmq_filter *filter, kmq_filter_clause **list, const char *name, size_t name_len,
                      const void *value, size_t value_len)
{
    if (name_len > SIZE_MAX / 4 || value_len > SIZE_MAX / 4) return KMQ_ENOMEM;
    kmq_filter_clause *clause = mem(filter, NULL, sizeof *clause + name_len + value_len);
    if (clause == NULL) return KMQ_ENOMEM;
    *clause = (kmq_filter_clause){.next = *list, .name_len = name_len, .value_len = value_len};
    memcpy(clause->bytes, name, name_len);
    if (value_len > 0) memcpy(clause->bytes + name_len, value, value_len);
    *list = clause;
    return KMQ_OK;
}

int kmq_filter_add_tag(kmq_filter *filter, const char *tag, size_t len)
{
    if (len == 0 || memchr(tag, ',', len) != NULL) return KMQ_EINVAL;
    return add_clause(filter, &filter->tags, tag, len, NULL, 0);
}

int kmq_filter_add_header(kmq_filter *filter, const char *name, size_t name_len, const void *value, size_t value_len)
{
    if (name_len == 0) return KMQ_EINVAL;
    return add_clause(filter, &filter->headers, name, name_len, value, value_len);
}

static void set_bit(uint64_t *set, size_t i) { set[i / 64] |= UINT64_C(1) << i % 64; }

static bool has_bit(const uint64_t *set, size_t i) { return (set[i / 64] >> i % 64 & 1) != 0; }

/* The word that begins at `at`; *next = where the one after it begins, or beyond len. */
static size_t word_at(const char *text, size_t len, size_t at, size_t *next)
{
    const char *dot = at < len ? memchr(text + at, '.', len - at) : NULL;
    size_t end = dot != NULL ? (size_t)(dot - text) : len;
    *next = end + 1;
    return end - at;
}

static bool is_word(const char *text, size_t len, char c) { return len == 1 && text[0] == c; }

/* words in the pattern, or KMQ_EINVAL */
static int64_t count_words(const char *pattern, size_t len)
{
    int64_t n = 0;
    for (size_t at = 0, next; len > 0 && at <= len; at = next, n++) { /* the empty text has no words */
        size_t word = word_at(pattern, len, at, &next);
        if (word > 1 && (memchr(pattern + at, '*', word) != NULL || memchr(pattern + at, '#', word) != NULL))
            return KMQ_EINVAL;
    }
    return n;
}

static int reserve_states(kmq_filter *filter, size_t n)
{
    if (n <= filter->words_cap) return KMQ_OK;
    void *words = mem(filter, filter->words, n * sizeof *filter->words);
    if (words == NULL) return KMQ_ENOMEM;
    filter->words = words;
    filter->words_cap = n;
    return KMQ_OK;
}

int kmq_filter_add_routing(kmq_filter *filter, const char *pattern, size_t len)
{
    int64_t n_words = count_words(pattern, len);
    if (n_words < 0) return (int)n_words;
    if (n_words + 1 > KMQ_FILTER_STATES - (int64_t)filter->n_states) return KMQ_EFULL;
    size_t first = filter->n_states, state = first;
    if (reserve_states(filter, first + (size_t)n_words + 1) < 0) return KMQ_ENOMEM;
    for (size_t at = 0, next; len > 0 && at <= len; at = next, state++) { /* copies first: they may fail */
        size_t word = word_at(pattern, len, at, &next);
        filter->words[state] = (kmq_filter_word){NULL, word};
        if (is_word(pattern + at, word, '*') || is_word(pattern + at, word, '#')) continue;
        char *text = mem(filter, NULL, word + 1); /* never empty: NULL means no word */
        if (text == NULL) {
            while (state > first) mem(filter, filter->words[--state].text, 0);
            return KMQ_ENOMEM;
        }
        if (word > 0) memcpy(text, pattern + at, word);
        filter->words[state].text = text;
    }
    filter->words[state] = (kmq_filter_word){NULL, 0};
    state = first;
    for (size_t at = 0, next; len > 0 && at <= len; at = next, state++) {
        size_t word = word_at(pattern, len, at, &next);
        if (is_word(pattern + at, word, '*')) set_bit(filter->any, state);
        if (is_word(pattern + at, word, '#')) set_bit(filter->hash, state);
    }
    set_bit(filter->start, first);
    set_bit(filter->accept, state);
    filter->n_states = state + 1;
    return KMQ_OK;
}

/* ---- matching */

bool kmq_filter_is_empty(const kmq_filter *filter)
{
    return filter->tags == NULL && filter->headers == NULL && filter->n_states == 0;
}

/* A # passes without a word: its bit goes on to the next state, as often as # follows #. */
static void pass_hashes(const kmq_filter *filter, uint64_t *states)
{
    for (size_t s = 0; s < filter->n_states; s++)
        if (has_bit(states, s) && has_bit(filter->hash, s)) set_bit(states, s + 1);
}

static void step(const kmq_filter *filter, uint64_t *states, const char *word, size_t len)
{
    uint64_t next[SET_WORDS] = {0};
    for (size_t i = 0; i < SET_WORDS; i++) {
        for (uint64_t set = states[i]; set != 0; set &= set - 1) {
            size_t s = i * 64 + (size_t)__builtin_ctzll(set);
            const kmq_filter_word *own = &filter->words[s];
            if (has_bit(filter->hash, s))
                set_bit(next, s);
            else if (has_bit(filter->any, s) ||
                     (own->text != NULL && own->len == len && memcmp(own->text, word, len) == 0))
                set_bit(next, s + 1);
        }
    }
    memcpy(states, next, sizeof next);
}

bool kmq_filter_match_routing(const kmq_filter *filter, const char *key, size_t len)
{
    uint64_t states[SET_WORDS];
    if (filter->n_states == 0) return false;
    memcpy(states, filter->start, sizeof states);
    pass_hashes(filter, states);
    for (size_t at = 0, next; len > 0 && at <= len; at = next) {
        size_t word = word_at(key, len, at, &next);
        step(filter, states, key + at, word);
        pass_hashes(filter, states);
    }
    for (size_t i = 0; i < SET_WORDS; i++)
        if ((states[i] & filter->accept[i]) != 0) return true;
    return false;
}

static bool equal(const void *a, size_t a_len, const void *b, size_t b_len)
{
    return a_len == b_len && (a_len == 0 || memcmp(a, b, a_len) == 0);
}

/* the first header of a name that has a value; NULL: none, or the first one's is null */
static const kmq_header *find(const kmq_header *headers, size_t n, const char *name, size_t len)
{
    for (size_t i = 0; i < n; i++)
        if (equal(headers[i].name, headers[i].name_len, name, len))
            return headers[i].value != NULL ? &headers[i] : NULL;
    return NULL;
}

static bool wants_tag(const kmq_filter *filter, const char *tag, size_t len)
{
    for (const kmq_filter_clause *clause = filter->tags; clause != NULL; clause = clause->next)
        if (equal(clause->bytes, clause->name_len, tag, len)) return true;
    return false;
}

static bool match_tags(const kmq_filter *filter, const kmq_header *header)
{
    const char *tags = header->value, *end = tags + header->value_len;
    while (tags <= end) {
        const char *comma = tags < end ? memchr(tags, ',', (size_t)(end - tags)) : NULL;
        const char *stop = comma != NULL ? comma : end;
        if (wants_tag(filter, tags, (size_t)(stop - tags))) return true;
        if (comma == NULL) break;
        tags = comma + 1;
    }
    return false;
}

bool kmq_filter_match(const kmq_filter *filter, const kmq_header *headers, size_t n_headers)
{
    const kmq_header *header;
    for (const kmq_filter_clause *clause = filter->headers; clause != NULL; clause = clause->next) {
        header = find(headers, n_headers, clause->bytes, clause->name_len);
        if (header == NULL ||
            !equal(header->value, header->value_len, clause->bytes + clause->name_len, clause->value_len))
            return false;
    }
    if (filter->tags != NULL) {
        header = find(headers, n_headers, "kmq-tags", strlen("kmq-tags"));
        if (header == NULL || !match_tags(filter, header)) return false;
    }
    if (filter->n_states > 0) {
        header = find(headers, n_headers, "kmq-routing-key", strlen("kmq-routing-key"));
        if (header == NULL || !kmq_filter_match_routing(filter, header->value, header->value_len)) return false;
    }
    return true;
}
