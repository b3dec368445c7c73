/* kmq_lease_tree - the leases of a lease book in offset order, with the earliest deadline and the smallest marker of
 * every subtree.
 *
 *                    [lo due marker child | lo due marker child | ...]          inner: the minima of the child
 *                      |                    '---------------.
 *       [lo due marker lease | lo due marker lease | ... ]  [ ... ]              leaf: up to 64 leases, 32 bytes each
 *
 * A B+tree whose entry looks the same at every level. The minima answer three questions without a heap beside the tree:
 * when is anything due (root), from which marker must be replayed (root), and what is due, in offset order (a walk that
 * enters only subtrees with due_ms <= now).
 *
 * A lease stands for the open offsets of a span [lo, lo + len); what its fields mean is the book's business. In flight
 * means: not due, whatever due_ms says.
 *
 * Invariants (kmq_lease_tree_check):
 *   (1) spans are ascending and disjoint;  (2) no node is empty, all leaves are at the same depth;
 *   (3) an inner entry's lo is its child's first lo, its due_ms the minimum over the child of what is not in flight
 *   (INT64_MAX: nothing), its marker the minimum over the child.
 *
 * Memory: leaves grow by 8 entries and are cut to size when they split, so random order fills them to over 90 %.
 * insert cannot fail: kmq_lease_tree_reserve is called before, and its spare nodes are touched only when the allocator
 * says no in the middle of a change. Thus a change of many leases is whole or not at all.
 *
 * Costs: seek, insert, remove, touched O(log n) with at most 64 entries looked at on a level; next, prev O(1) amortised.
 * A path is good until the next insert or remove.  Thread rule: one owner. No I/O, no clock. */
#ifndef KMQ_LEASE_TREE_H
#define KMQ_LEASE_TREE_H
#include "kmq.h"

enum {
    KMQ_LEASE_NODE_MAX = 64,   /* entries */
    KMQ_LEASE_LEVELS = 14,     /* nodes split in halves: 32^13 leases are more than there are offsets */
    KMQ_LEASE_IN_FLIGHT = 0x80 /* in kmq_lease.flags, beside KMQ_FLAG_... */
};

typedef struct kmq_lease_node kmq_lease_node;

typedef struct kmq_lease {
    int64_t lo;
    int64_t due_ms;
    int64_t marker;
    union {
        kmq_lease_node *child; /* inner */
        struct {               /* leaf */
            uint32_t extra;    /* the book's slot for open bits and text; 0 = none */
            uint16_t len;
            uint8_t cause, flags;
        };
    };
} kmq_lease;

typedef struct kmq_lease_tree {
    kmq_alloc alloc;
    kmq_lease_node *root;   /* NULL: empty */
    int height;             /* levels; 0: empty */
    kmq_lease_node **spare; /* full-size nodes for when the allocator fails */
    size_t n_spare, spare_cap;
    size_t bytes;
} kmq_lease_tree;

typedef struct kmq_lease_path {
    struct {
        kmq_lease_node *node;
        uint32_t i;
    } at[KMQ_LEASE_LEVELS]; /* root first; the last one in use is the leaf */
} kmq_lease_path;

void kmq_lease_tree_init(kmq_lease_tree *tree, const kmq_alloc *alloc);
void kmq_lease_tree_free(kmq_lease_tree *tree);

/* To the last lease with lo <= offset, or to the first lease if all are behind it. false: the tree is empty. */
bool kmq_lease_tree_seek(const kmq_lease_tree *tree, int64_t offset, kmq_lease_path *path);
/* To the first lease from lo `from` on that is due and not in flight. false: there is none, path undefined. */
bool kmq_lease_tree_seek_due(const kmq_lease_tree *tree, int64_t from, int64_t now_ms, kmq_lease_path *path);
/* From a lease that was due to the next due one of the same leaf, so that `touched` once a leaf is enough. false: none
 * left in it, path unchanged. */
bool kmq_lease_tree_next_due(const kmq_lease_tree *tree, kmq_lease_path *path, int64_t now_ms);
/* One lease on or back; false: there is none, path unchanged. */
bool kmq_lease_tree_next(const kmq_lease_tree *tree, kmq_lease_path *path);
bool kmq_lease_tree_prev(const kmq_lease_tree *tree, kmq_lease_path *path);
/* lo of the lease after the path's; INT64_MAX: it is the last. */
int64_t kmq_lease_tree_next_lo(const kmq_lease_tree *tree, const kmq_lease_path *path);
/* The lease at the path. Who changes it in place calls touched before anything else looks at the tree, or moved if only lo
 * and len have changed; lo may only move within the gap around it. */
kmq_lease *kmq_lease_tree_at(const kmq_lease_tree *tree, const kmq_lease_path *path);
void kmq_lease_tree_touched(kmq_lease_tree *tree, const kmq_lease_path *path);
void kmq_lease_tree_moved(kmq_lease_tree *tree, const kmq_lease_path *path);

/* Nodes that inserting n leases side by side can need at the most. */
size_t kmq_lease_tree_nodes_for(const kmq_lease_tree *tree, size_t n);
/* Sees to it that at least n spare nodes are there. ENOMEM: some fewer are, nothing else has changed. */
int kmq_lease_tree_reserve(kmq_lease_tree *tree, size_t n);
/* Gives spare nodes back down to n. */
void kmq_lease_tree_trim(kmq_lease_tree *tree, size_t n);
/* path: from a seek to lease->lo (undefined when the tree is empty). The lease is copied. Nodes have been reserved. */
void kmq_lease_tree_insert(kmq_lease_tree *tree, kmq_lease_path *path, const kmq_lease *lease);
void kmq_lease_tree_remove(kmq_lease_tree *tree, kmq_lease_path *path);

int64_t kmq_lease_tree_min_due(const kmq_lease_tree *tree);    /* INT64_MAX: none */
int64_t kmq_lease_tree_min_marker(const kmq_lease_tree *tree); /* INT64_MAX: empty */
void kmq_lease_tree_check(const kmq_lease_tree *tree);
#endif
