/* kmq - see kmq.h. */
#include "kmq.h"

#include <stdlib.h>

static void *libc_realloc(void *ctx, void *ptr, size_t size)
{
    (void)ctx;
    if (size == 0) {
        free(ptr); /* realloc(p, 0) may return a block that nobody would free */
        return NULL;
    }
    return realloc(ptr, size);
}

kmq_alloc kmq_alloc_libc(void) { return (kmq_alloc){libc_realloc, NULL}; }
