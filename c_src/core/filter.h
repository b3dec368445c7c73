/* kmq_filter - which messages a consumer wants: by tags, by header values, by routing key.
 *
 *     any_tag        a, b, c          one of the message's tags (header kmq-tags: "a,b", comma-separated) is in the list
 *     header         name = value     the first header of that name has exactly these bytes
 *     routing        orders.*.eu.#    the message's routing key (header kmq-routing-key) matches one of the patterns
 *
 * Clauses of different kinds must all hold, and every header clause; tags and patterns hold when one of them does. A filter
 * without clauses wants everything. A message without the header does not match a clause about it.
 *
 * Routing patterns are AMQP's: words between dots, * is exactly one word, # is zero or more. All patterns of a filter are
 * compiled into one list of states, a bit each, and matched in one pass over the key, word by word:
 *
 *     orders.*.eu.#     state 0 -orders-> 1 -*-> 2 -eu-> 3(#) : accepting; a # state keeps its bit on every word
 *     a step looks at the states whose bit is set: a # stays, the others go on to their neighbour if they like the word
 *
 * Invariants: (1) a compiled filter does not change; (2) it has at most KMQ_FILTER_STATES states; (3) matching allocates
 * nothing and looks at every byte of a header's value once for each tag or word of the filter at the most.
 *
 * Costs: match O(headers + key bytes + words x states).  Memory: the clauses' text.
 * Thread rule: building has one owner; a built filter may be matched from any number of threads. */
#ifndef KMQ_FILTER_H
#define KMQ_FILTER_H
#include "kmq.h"

enum { KMQ_FILTER_STATES = 512 }; /* words of all routing patterns together, and one more a pattern */

typedef struct kmq_filter_clause kmq_filter_clause;
typedef struct kmq_filter_word kmq_filter_word;

typedef struct kmq_filter {
    kmq_alloc alloc;
    kmq_filter_clause *tags, *headers; /* lists */
    kmq_filter_word *words;            /* one a state that waits for a word */
    size_t n_states, words_cap;
    uint64_t any[KMQ_FILTER_STATES / 64];    /* states that wait for * */
    uint64_t hash[KMQ_FILTER_STATES / 64];   /* states that are a # */
    uint64_t start[KMQ_FILTER_STATES / 64];  /* first states of the patterns */
    uint64_t accept[KMQ_FILTER_STATES / 64]; /* last ones */
} kmq_filter;

void kmq_filter_init(kmq_filter *filter, const kmq_alloc *alloc);
void kmq_filter_free(kmq_filter *filter);

/* The bytes are copied. ENOMEM: unchanged. EINVAL: an empty tag, one with a comma, an empty header name. */
int kmq_filter_add_tag(kmq_filter *filter, const char *tag, size_t len);
int kmq_filter_add_header(kmq_filter *filter, const char *name, size_t name_len, const void *value, size_t value_len);
/* EINVAL: * or # inside a longer word, as in "a*.b". EFULL: more states than KMQ_FILTER_STATES. Unchanged then. */
int kmq_filter_add_routing(kmq_filter *filter, const char *pattern, size_t len);

bool kmq_filter_is_empty(const kmq_filter *filter);
/* The message's headers, in order. A null value equals nothing. */
bool kmq_filter_match(const kmq_filter *filter, const kmq_header *headers, size_t n_headers);
/* the routing patterns alone; false when there are none */
bool kmq_filter_match_routing(const kmq_filter *filter, const char *key, size_t len);
#endif
