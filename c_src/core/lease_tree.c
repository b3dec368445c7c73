/* kmq_lease_tree - see lease_tree.h for the picture and the invariants. */
#include "lease_tree.h"

#include <assert.h>
#include <string.h>

struct kmq_lease_node {
    uint16_t n, cap;
    bool leaf;
    kmq_lease e[];
};

enum {
    LEAF_STEP = 8,   /* leaves grow by this */
    LEAF_SLACK = 16, /* and shrink when more than this is free */
    MERGE_BELOW = 8, /* a node with fewer entries looks for a neighbour to join */
    MERGE_INTO = 48  /* if they have no more than this together: far from the next split */
};

static size_t node_bytes(size_t cap) { return sizeof(kmq_lease_node) + cap * sizeof(kmq_lease); }

/* ---- nodes */

static kmq_lease_node *node_alloc(kmq_lease_tree *tree, size_t cap)
{
    kmq_lease_node *node = tree->alloc.realloc(tree->alloc.ctx, NULL, node_bytes(cap));
    if (node == NULL) return NULL;
    node->n = 0;
    node->cap = (uint16_t)cap;
    tree->bytes += node_bytes(cap);
    return node;
}

static void node_free(kmq_lease_tree *tree, kmq_lease_node *node)
{
    tree->bytes -= node_bytes(node->cap);
    tree->alloc.realloc(tree->alloc.ctx, node, 0);
}

/* cannot fail while a spare node is left */
static kmq_lease_node *node_new(kmq_lease_tree *tree, size_t cap, bool leaf)
{
    kmq_lease_node *node = node_alloc(tree, cap);
    if (node == NULL) {
        assert(tree->n_spare > 0);
        node = tree->spare[--tree->n_spare];
        node->n = 0;
    }
    node->leaf = leaf;
    return node;
}

/* Where the pointer to the path's node on this level stands. */
static kmq_lease_node **node_link(kmq_lease_tree *tree, const kmq_lease_path *path, int level)
{
    return level == 0 ? &tree->root : &path->at[level - 1].node->e[path->at[level - 1].i].child;
}

static bool node_resize(kmq_lease_tree *tree, kmq_lease_path *path, int level, size_t cap)
{
    kmq_lease_node *node = path->at[level].node;
    size_t old = node->cap;
    node = tree->alloc.realloc(tree->alloc.ctx, node, node_bytes(cap));
    if (node == NULL) return false;
    node->cap = (uint16_t)cap;
    tree->bytes += node_bytes(cap);
    tree->bytes -= node_bytes(old);
    path->at[level].node = *node_link(tree, path, level) = node;
    return true;
}

static size_t leaf_cap(size_t n)
{
    size_t cap = (n + LEAF_STEP - 1) / LEAF_STEP * LEAF_STEP;
    return cap < KMQ_LEASE_NODE_MAX ? cap : KMQ_LEASE_NODE_MAX;
}

static void leaf_shrink(kmq_lease_tree *tree, kmq_lease_path *path, int level)
{
    kmq_lease_node *node = path->at[level].node;
    if (node->leaf && (size_t)(node->cap - node->n) > LEAF_SLACK)
        (void)node_resize(tree, path, level, leaf_cap((size_t)node->n + 1)); /* no: it stays large */
}

/* Room for one more in a leaf that is not at its maximum. */
static void leaf_grow(kmq_lease_tree *tree, kmq_lease_path *path, int level)
{
    kmq_lease_node *old = path->at[level].node;
    if (node_resize(tree, path, level, leaf_cap((size_t)old->n + 1))) return;
    kmq_lease_node *node = node_new(tree, KMQ_LEASE_NODE_MAX, true);
    memcpy(node->e, old->e, old->n * sizeof *old->e);
    node->n = old->n;
    path->at[level].node = *node_link(tree, path, level) = node;
    node_free(tree, old);
}

/* ---- minima */

static int64_t due_of(const kmq_lease_node *node, uint32_t i)
{
    return node->leaf && (node->e[i].flags & KMQ_LEASE_IN_FLIGHT) != 0 ? INT64_MAX : node->e[i].due_ms;
}

static kmq_lease summary(kmq_lease_node *node)
{
    kmq_lease sum = {.lo = node->e[0].lo, .due_ms = INT64_MAX, .marker = INT64_MAX, .child = node};
    if (node->leaf) {
        for (uint32_t i = 0; i < node->n; i++) {
            int64_t due_ms = due_of(node, i), marker = node->e[i].marker;
            sum.due_ms = due_ms < sum.due_ms ? due_ms : sum.due_ms;
            sum.marker = marker < sum.marker ? marker : sum.marker;
        }
    } else {
        for (uint32_t i = 0; i < node->n; i++) {
            int64_t due_ms = node->e[i].due_ms, marker = node->e[i].marker;
            sum.due_ms = due_ms < sum.due_ms ? due_ms : sum.due_ms;
            sum.marker = marker < sum.marker ? marker : sum.marker;
        }
    }
    return sum;
}

static bool same_sum(const kmq_lease *a, const kmq_lease *b)
{
    return a->lo == b->lo && a->due_ms == b->due_ms && a->marker == b->marker;
}

/* from the parent of `level` up, as far as anything changes */
static void pull_up(const kmq_lease_path *path, int level)
{
    for (; level > 0; level--) {
        kmq_lease *up = &path->at[level - 1].node->e[path->at[level - 1].i];
        kmq_lease sum = summary(path->at[level].node);
        if (same_sum(up, &sum)) return;
        *up = sum;
    }
}

/* The same after an insert below `level`: minima can only fall. */
static void widen_up(const kmq_lease_path *path, int level, const kmq_lease *by)
{
    for (; level > 0; level--) {
        kmq_lease *up = &path->at[level - 1].node->e[path->at[level - 1].i];
        if (up->lo <= by->lo && up->due_ms <= by->due_ms && up->marker <= by->marker) return;
        if (by->lo < up->lo) up->lo = by->lo;
        if (by->due_ms < up->due_ms) up->due_ms = by->due_ms;
        if (by->marker < up->marker) up->marker = by->marker;
    }
}

void kmq_lease_tree_touched(kmq_lease_tree *tree, const kmq_lease_path *path) { pull_up(path, tree->height - 1); }

void kmq_lease_tree_moved(kmq_lease_tree *tree, const kmq_lease_path *path)
{
    if (path->at[tree->height - 1].i == 0) pull_up(path, tree->height - 1);
}

int64_t kmq_lease_tree_min_due(const kmq_lease_tree *tree)
{
    return tree->root != NULL ? summary(tree->root).due_ms : INT64_MAX;
}

int64_t kmq_lease_tree_min_marker(const kmq_lease_tree *tree)
{
    return tree->root != NULL ? summary(tree->root).marker : INT64_MAX;
}

/* ---- walking */

/* the last entry with lo <= offset, or 0 */
static uint32_t find(const kmq_lease_node *node, int64_t offset)
{
    uint32_t lo = 0, n = node->n;
    while (n > 1) { /* the answer is in [lo, lo + n) */
        uint32_t half = n / 2;
        if (node->e[lo + half].lo <= offset) lo += half;
        n -= half;
    }
    return lo;
}

/* A large book's leaves are not in the cache, and a binary search would wait for one line after the other. */
static void warm(const kmq_lease_node *node)
{
    for (uint32_t i = 0; i < node->n; i += 4) __builtin_prefetch(&node->e[i]);
}

bool kmq_lease_tree_seek(const kmq_lease_tree *tree, int64_t offset, kmq_lease_path *path)
{
    kmq_lease_node *node = tree->root;
    if (node == NULL) return false;
    for (int level = 0;; level++) {
        path->at[level].node = node;
        if (node->leaf) warm(node);
        path->at[level].i = find(node, offset);
        if (node->leaf) return true;
        node = node->e[path->at[level].i].child;
    }
}

bool kmq_lease_tree_seek_due(const kmq_lease_tree *tree, int64_t from, int64_t now_ms, kmq_lease_path *path)
{
    int level = 0;
    if (tree->root == NULL) return false;
    path->at[0].node = tree->root;
    path->at[0].i = find(tree->root, from);
    for (;;) {
        kmq_lease_node *node = path->at[level].node;
        uint32_t i = path->at[level].i;
        if (node->leaf && i < node->n && node->e[i].lo < from) i++;
        while (i < node->n && due_of(node, i) > now_ms) i++;
        path->at[level].i = i;
        if (i == node->n) { /* only the child that `from` cuts can disappoint */
            if (level == 0) return false;
            path->at[--level].i++;
        } else if (node->leaf) {
            return true;
        } else {
            node = node->e[i].child;
            path->at[++level].node = node;
            path->at[level].i = find(node, from);
        }
    }
}

bool kmq_lease_tree_next_due(const kmq_lease_tree *tree, kmq_lease_path *path, int64_t now_ms)
{
    int level = tree->height - 1;
    const kmq_lease_node *node = path->at[level].node;
    for (uint32_t i = path->at[level].i + 1; i < node->n; i++) {
        if (due_of(node, i) <= now_ms) {
            path->at[level].i = i;
            return true;
        }
    }
    return false;
}

bool kmq_lease_tree_next(const kmq_lease_tree *tree, kmq_lease_path *path)
{
    int level = tree->height - 1;
    while (level >= 0 && path->at[level].i + 1u == path->at[level].node->n) level--;
    if (level < 0) return false;
    path->at[level].i++;
    for (; level + 1 < tree->height; level++) {
        path->at[level + 1].node = path->at[level].node->e[path->at[level].i].child;
        path->at[level + 1].i = 0;
    }
    return true;
}

int64_t kmq_lease_tree_next_lo(const kmq_lease_tree *tree, const kmq_lease_path *path)
{
    for (int level = tree->height - 1; level >= 0; level--) { /* an inner entry knows the first lo below it */
        const kmq_lease_node *node = path->at[level].node;
        uint32_t i = path->at[level].i + 1;
        if (i < node->n) return node->e[i].lo;
    }
    return INT64_MAX;
}

bool kmq_lease_tree_prev(const kmq_lease_tree *tree, kmq_lease_path *path)
{
    int level = tree->height - 1;
    while (level >= 0 && path->at[level].i == 0) level--;
    if (level < 0) return false;
    path->at[level].i--;
    for (; level + 1 < tree->height; level++) {
        path->at[level + 1].node = path->at[level].node->e[path->at[level].i].child;
        path->at[level + 1].i = path->at[level + 1].node->n - 1u;
    }
    return true;
}

kmq_lease *kmq_lease_tree_at(const kmq_lease_tree *tree, const kmq_lease_path *path)
{
    int leaf = tree->height - 1;
    return &path->at[leaf].node->e[path->at[leaf].i];
}

/* ---- changing */

/* Side by side n leases fill n / 32 new leaves at the least favourable split, the leaf they start in may have to move to
 * a spare node and to split, and every level above may split once, and once more for each 32 of the level below. */
size_t kmq_lease_tree_nodes_for(const kmq_lease_tree *tree, size_t n)
{
    return n == 0 ? 0 : (size_t)tree->height + 4 + n / 12;
}

int kmq_lease_tree_reserve(kmq_lease_tree *tree, size_t n)
{
    if (n > tree->spare_cap) {
        size_t cap = n < 16 ? 16 : n;
        void *spare = tree->alloc.realloc(tree->alloc.ctx, tree->spare, cap * sizeof(kmq_lease_node *));
        if (spare == NULL) return KMQ_ENOMEM;
        tree->bytes += (cap - tree->spare_cap) * sizeof(kmq_lease_node *);
        tree->spare = spare;
        tree->spare_cap = cap;
    }
    while (tree->n_spare < n) {
        kmq_lease_node *node = node_alloc(tree, KMQ_LEASE_NODE_MAX);
        if (node == NULL) return KMQ_ENOMEM;
        tree->spare[tree->n_spare++] = node;
    }
    return KMQ_OK;
}

void kmq_lease_tree_trim(kmq_lease_tree *tree, size_t n)
{
    while (tree->n_spare > n) node_free(tree, tree->spare[--tree->n_spare]);
}

static void put(kmq_lease_node *node, uint32_t i, const kmq_lease *lease)
{
    memmove(&node->e[i + 1], &node->e[i], (node->n - i) * sizeof *node->e);
    node->e[i] = *lease;
    node->n++;
}

/* Moves the upper part of the path's full node into a new one on its right, puts the lease at i, and returns the new
 * node. At the right edge of the tree nothing is moved: offsets mostly come in order, and leaves stay full. */
static kmq_lease_node *split(kmq_lease_tree *tree, kmq_lease_path *path, int level, uint32_t i, const kmq_lease *lease)
{
    kmq_lease_node *left = path->at[level].node;
    bool edge = i == left->n;
    for (int up = level - 1; up >= 0; up--) edge = edge && path->at[up].i + 1u == path->at[up].node->n;
    uint32_t keep = edge ? left->n : left->n / 2u;
    kmq_lease_node *right = node_new(tree, left->leaf ? leaf_cap(left->n - keep + 1u) : KMQ_LEASE_NODE_MAX, left->leaf);
    memcpy(right->e, &left->e[keep], (left->n - keep) * sizeof *left->e);
    right->n = (uint16_t)(left->n - keep);
    left->n = (uint16_t)keep;
    if (i > keep || edge)
        put(right, i - keep, lease);
    else
        put(left, i, lease);
    leaf_shrink(tree, path, level);
    return right;
}

void kmq_lease_tree_insert(kmq_lease_tree *tree, kmq_lease_path *path, const kmq_lease *lease)
{
    kmq_lease add = *lease;
    int level = tree->height - 1;
    if (level < 0) {
        tree->root = node_new(tree, LEAF_STEP, true);
        tree->height = 1;
        put(tree->root, 0, &add);
        return;
    }
    uint32_t i = path->at[level].i + (path->at[level].node->e[path->at[level].i].lo < add.lo);
    for (; level >= 0; level--) {
        if (path->at[level].node->n < KMQ_LEASE_NODE_MAX) {
            if (path->at[level].node->n == path->at[level].node->cap) leaf_grow(tree, path, level);
            put(path->at[level].node, i, &add);
            add.due_ms = due_of(path->at[level].node, i);
            widen_up(path, level, &add);
            return;
        }
        kmq_lease_node *right = split(tree, path, level, i, &add);
        if (level > 0) {
            path->at[level - 1].node->e[path->at[level - 1].i] = summary(path->at[level].node);
            i = path->at[level - 1].i + 1;
        }
        add = summary(right);
    }
    kmq_lease_node *root = node_new(tree, KMQ_LEASE_NODE_MAX, false);
    root->e[0] = summary(tree->root);
    root->e[1] = add;
    root->n = 2;
    tree->root = root;
    tree->height++;
    assert(tree->height <= KMQ_LEASE_LEVELS);
}

static void take_out(kmq_lease_node *node, uint32_t i)
{
    node->n--;
    memmove(&node->e[i], &node->e[i + 1], (node->n - i) * sizeof *node->e);
}

/* Joins the path's node, nearly empty, with a neighbour below the same parent, if they fit well. The path then stands at
 * the joined node, its index on this level undefined. */
static bool join(kmq_lease_tree *tree, kmq_lease_path *path, int level)
{
    if (level == 0 || path->at[level].node->n >= MERGE_BELOW) return false;
    kmq_lease_node *parent = path->at[level - 1].node;
    uint32_t i = path->at[level - 1].i; /* join i and i + 1 */
    if (i + 1u == parent->n) {
        if (i == 0) return false;
        i--;
    }
    kmq_lease_node *left = parent->e[i].child, *right = parent->e[i + 1].child;
    size_t n = (size_t)left->n + right->n;
    if (n > MERGE_INTO) return false;
    path->at[level - 1].i = i;
    path->at[level].node = left;
    if (n > left->cap && !node_resize(tree, path, level, leaf_cap(n))) return false; /* no: they stay apart */
    left = path->at[level].node;
    memcpy(&left->e[left->n], right->e, right->n * sizeof *right->e);
    left->n = (uint16_t)n;
    node_free(tree, right);
    parent->e[i] = summary(left);
    take_out(parent, i + 1);
    return true;
}

void kmq_lease_tree_remove(kmq_lease_tree *tree, kmq_lease_path *path)
{
    int level = tree->height - 1;
    kmq_lease *gone = kmq_lease_tree_at(tree, path);
    int64_t lo = gone->lo, marker = gone->marker, due_ms = due_of(path->at[level].node, path->at[level].i);
    take_out(path->at[level].node, path->at[level].i);
    for (; level >= 0 && path->at[level].node->n == 0; level--) {
        node_free(tree, path->at[level].node);
        if (level > 0) take_out(path->at[level - 1].node, path->at[level - 1].i);
    }
    if (level < 0) {
        tree->root = NULL;
        tree->height = 0;
        return;
    }
    /* What is left of the path stands at nodes that are not empty; its lowest index may be off by one and is not used. */
    for (; level >= 0; level--) {
        leaf_shrink(tree, path, level);
        if (level == 0) break;
        kmq_lease *up = &path->at[level - 1].node->e[path->at[level - 1].i];
        bool minimum = up->lo >= lo || up->due_ms >= due_ms || up->marker >= marker;
        if (minimum) {
            kmq_lease sum = summary(path->at[level].node);
            minimum = !same_sum(up, &sum);
            *up = sum;
        }
        bool joined = join(tree, path, level);
        if (!minimum && !joined) return; /* mostly it was none of the minima */
    }
    while (!tree->root->leaf && tree->root->n == 1) {
        kmq_lease_node *root = tree->root;
        tree->root = root->e[0].child;
        tree->height--;
        node_free(tree, root);
    }
}

/* ---- whole trees */

void kmq_lease_tree_init(kmq_lease_tree *tree, const kmq_alloc *alloc) { *tree = (kmq_lease_tree){.alloc = *alloc}; }

void kmq_lease_tree_free(kmq_lease_tree *tree)
{
    struct {
        kmq_lease_node *node;
        uint32_t i;
    } at[KMQ_LEASE_LEVELS];
    int level = 0;
    at[0].node = tree->root;
    at[0].i = 0;
    while (tree->root != NULL && level >= 0) {
        kmq_lease_node *node = at[level].node;
        if (node->leaf || at[level].i == node->n) {
            node_free(tree, node);
            level--;
        } else {
            at[level + 1].node = node->e[at[level].i++].child;
            at[++level].i = 0;
        }
    }
    kmq_lease_tree_trim(tree, 0);
    tree->alloc.realloc(tree->alloc.ctx, tree->spare, 0);
    kmq_lease_tree_init(tree, &(kmq_alloc){tree->alloc.realloc, tree->alloc.ctx});
}

void kmq_lease_tree_check(const kmq_lease_tree *tree)
{
    kmq_lease_path path;
    int64_t end = INT64_MIN;
    assert((tree->root == NULL) == (tree->height == 0));
    if (!kmq_lease_tree_seek(tree, INT64_MIN, &path)) return;
    do {
        const kmq_lease *lease = kmq_lease_tree_at(tree, &path);
        assert(lease->len > 0 && lease->lo >= end && lease->lo <= INT64_MAX - lease->len);
        end = lease->lo + lease->len;
        /* each node once: when the path enters it */
        for (int level = tree->height - 1; level >= 0 && path.at[level].i == 0; level--) {
            kmq_lease_node *node = path.at[level].node;
            assert(node->n > 0 && node->n <= node->cap && node->leaf == (level == tree->height - 1));
            if (level == 0) break;
            kmq_lease sum = summary(node);
            const kmq_lease *up = &path.at[level - 1].node->e[path.at[level - 1].i];
            assert(same_sum(up, &sum) && up->child == node);
            (void)sum, (void)up;
        }
    } while (kmq_lease_tree_next(tree, &path));
    (void)end;
}
