/* prototypes; the implementation adds the picture, invariants, costs and thread rule (style.md) */
#ifndef KMQ_OFFSET_SET_H
#define KMQ_OFFSET_SET_H
#include "kmq.h"
typedef struct kmq_offset_set kmq_offset_set; /* embedded: the struct is defined here by its author */
void kmq_offset_set_init(kmq_offset_set *set, const kmq_alloc *alloc);
void kmq_offset_set_free(kmq_offset_set *set);
int kmq_offset_set_add(kmq_offset_set *set, int64_t lo, int64_t hi, int64_t *added);      /* added may be NULL */
int kmq_offset_set_remove(kmq_offset_set *set, int64_t lo, int64_t hi, int64_t *removed); /* removed may be NULL */
bool kmq_offset_set_has(const kmq_offset_set *set, int64_t offset);
int64_t kmq_offset_set_count(const kmq_offset_set *set);
/* the first maximal run of members at or after `from`: its part from `from` on */
bool kmq_offset_set_next(const kmq_offset_set *set, int64_t from, kmq_range *run);
bool kmq_offset_set_last(const kmq_offset_set *set, int64_t *offset);
size_t kmq_offset_set_bytes(const kmq_offset_set *set);
void kmq_offset_set_check(const kmq_offset_set *set);
#endif
