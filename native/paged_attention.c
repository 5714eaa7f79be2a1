#include "paged_attention.h"

#include "paged_tile.h"

#ifdef DDTREE_AVX2

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#define MIN_PARTS 4
#define MAX_PARTS 16 /* whole vectors of weights */
/* Below so many multiply-adds waking the threads costs more than they save. */
#define SMALL 65536

typedef ddtree_paged_attention_args arguments;

/* The context's positions [first, end), at most TILE of them; none if first >= end. */
static key_tile context_tile(const arguments *a, ptrdiff_t request, ptrdiff_t head,
                             ptrdiff_t first, ptrdiff_t end) {
    const int32_t *table = a->block_tables + request * a->table_request;
    key_tile tile = {.key_step = a->block_size, .value_step = a->width};
    tile.count = end - first < TILE ? (end > first ? end - first : 0) : TILE;
    for (ptrdiff_t k = 0; k < tile.count; k += PANEL) {
        const ptrdiff_t block = table[(first + k) / a->block_size];
        const ptrdiff_t inside = (first + k) % a->block_size;
        tile.keys[k / PANEL] =
            a->key_cache + block * a->key_cache_block + head * a->key_cache_head + inside;
        tile.values[k / PANEL] = a->value_cache + block * a->value_cache_block +
                                 head * a->value_cache_head + inside * a->width;
    }
    return tile;
}

static void look_at_context(const arguments *a, ptrdiff_t request, ptrdiff_t head, ptrdiff_t first,
                            ptrdiff_t end, const query_block *all) {
    key_tile tile = context_tile(a, request, head, first, end);
    for (; first < end; first += TILE) {
        const key_tile next = context_tile(a, request, head, first + TILE, end);
        ddtree_look(&tile, &next, all);
        tile = next;
    }
}

/* The tree's rows, which are the step's rows from `start` on. */
static void look_at_tree(const arguments *a, ptrdiff_t start, ptrdiff_t num_rows, ptrdiff_t head,
                         const int64_t *words, const query_block *all) {
    const key_tile none = {.count = 0};
    key_tile tile = {.key_step = TILE, .value_step = a->value_row, .words = words};
    for (ptrdiff_t first = 0; first < num_rows; first += TILE) {
        tile.first_key = first;
        tile.count = num_rows - first < TILE ? num_rows - first : TILE;
        for (ptrdiff_t k = 0; k < tile.count; k++) {
            const ptrdiff_t row = start + first + k;
            const float *key = a->keys + row * a->key_row + head * a->key_head;
            for (ptrdiff_t c = 0; c < a->width; c++) all->tail[c * TILE + k] = key[c];
            if (k % PANEL == 0) {
                tile.keys[k / PANEL] = all->tail + k;
                tile.values[k / PANEL] = a->values + row * a->value_row + head * a->value_head;
            }
        }
        ddtree_look(&tile, &none, all);
    }
}

/* One request: its rows, and the parts its context is cut into. */
typedef struct {
    ptrdiff_t first_row, num_rows, context, num_parts, part_length;
    const int64_t *words;
    float *parts;       /* [kv_heads, num_parts, queries, width + 2]; unused with one part */
    ptrdiff_t *missing; /* [kv_heads], parts that are not done */
} tree_request;

typedef struct {
    ptrdiff_t request, head, part;
} part_task;

static float *out_of(const arguments *a, const tree_request *one, ptrdiff_t head, ptrdiff_t query) {
    const ptrdiff_t group = a->num_heads / a->num_kv_heads;
    return a->out + (one->first_row + query / group) * a->out_row +
           (head * group + query % group) * a->out_head;
}

/* What one part found out for a query: sums, highest score, total of the weights. */
static float *part_of(const tree_request *one, const query_block *all, ptrdiff_t head,
                      ptrdiff_t part, ptrdiff_t query) {
    const ptrdiff_t place = (head * one->num_parts + part) * all->count + query;
    return one->parts + place * (all->width + 2);
}

DDTREE_TARGET static void start_queries(const arguments *a, const tree_request *one,
                                        ptrdiff_t head, query_block *all) {
    const __m256 scale = _mm256_set1_ps(a->scale * 1.44269504f);
    for (ptrdiff_t q = 0; q < all->count; q++) {
        const float *query = a->query + (one->first_row + q / all->group) * a->query_row +
                             (head * all->group + q % all->group) * a->query_head;
        for (ptrdiff_t c = 0; c < all->width; c += LANES) {
            const ptrdiff_t at = q * all->width + c;
            _mm256_storeu_ps(all->queries + at, _mm256_mul_ps(scale, _mm256_loadu_ps(query + c)));
            _mm256_storeu_ps(all->sums + at, _mm256_setzero_ps());
        }
        _mm256_storeu_ps(all->totals + q * LANES, _mm256_setzero_ps());
        all->highest[q] = -1e30f;
    }
}

DDTREE_TARGET static void run_task(const arguments *a, const tree_request *one,
                                   const part_task *task, query_block *all) {
    all->count = one->num_rows * all->group;
    start_queries(a, one, task->head, all);
    const ptrdiff_t first = task->part * one->part_length, end = first + one->part_length;
    look_at_context(a, task->request, task->head, first, end < one->context ? end : one->context,
                    all);
    if (task->part == one->num_parts - 1)
        look_at_tree(a, one->first_row, one->num_rows, task->head, one->words, all);
    for (ptrdiff_t q = 0; q < all->count; q++) {
        const float total = ddtree_sum(_mm256_loadu_ps(all->totals + q * LANES));
        const float factor = one->num_parts == 1 ? 1.0f / total : 1.0f;
        float *to = one->num_parts == 1 ? out_of(a, one, task->head, q)
                                        : part_of(one, all, task->head, task->part, q);
        for (ptrdiff_t c = 0; c < all->width; c++) to[c] = factor * all->sums[q * all->width + c];
        if (one->num_parts == 1) continue;
        to[all->width] = all->highest[q];
        to[all->width + 1] = total;
    }
}

/* One softmax over the keys of all parts. */
DDTREE_TARGET static void merge_parts(const arguments *a, const tree_request *one, ptrdiff_t head,
                                      const query_block *all) {
    const ptrdiff_t width = all->width, step = all->count * (width + 2);
    for (ptrdiff_t q = 0; q < all->count; q++) {
        const float *parts = part_of(one, all, head, 0, q);
        float weights[MAX_PARTS] = {0}, highest = -INFINITY, total = 0.0f;
        float *out = out_of(a, one, head, q);
        for (ptrdiff_t p = 0; p < one->num_parts; p++) {
            weights[p] = parts[p * step + width];
            highest = weights[p] > highest ? weights[p] : highest;
        }
        for (ptrdiff_t p = 0; p < MAX_PARTS; p += LANES)
            _mm256_storeu_ps(weights + p, exp2_lanes(_mm256_sub_ps(_mm256_loadu_ps(weights + p),
                                                                   _mm256_set1_ps(highest))));
        for (ptrdiff_t p = 0; p < one->num_parts; p++)
            total += weights[p] * parts[p * step + width + 1];
        for (ptrdiff_t c = 0; c < width; c += LANES) {
            __m256 sum = _mm256_setzero_ps();
            for (ptrdiff_t p = 0; p < one->num_parts; p++)
                sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[p]),
                                      _mm256_loadu_ps(parts + p * step + c), sum);
            _mm256_storeu_ps(out + c, _mm256_mul_ps(_mm256_set1_ps(1.0f / total), sum));
        }
    }
}

/* By the context's length alone: neither the requests beside it nor the number of threads change
 * how a request's sums are rounded. */
static void cut(tree_request *one) {
    const ptrdiff_t tiles = (one->context + TILE - 1) / TILE;
    const ptrdiff_t wanted = tiles / 4 < MIN_PARTS ? MIN_PARTS : tiles / 4;
    const ptrdiff_t parts = wanted < MAX_PARTS ? wanted : MAX_PARTS;
    const ptrdiff_t length = tiles == 0 ? 1 : (tiles + parts - 1) / parts;
    one->part_length = length * TILE;
    one->num_parts = tiles == 0 ? 1 : (tiles + length - 1) / length;
}

typedef struct {
    tree_request *requests; /* [S] */
    part_task *tasks;       /* [num_tasks] */
    ptrdiff_t *missing;     /* [S, kv_heads] */
    float *parts;           /* of all requests with more than one */
    float *own;             /* [threads, own_size] */
    ptrdiff_t num_tasks, parts_size, most_queries, own_size, work;
} work_plan;

static void plan_requests(const arguments *a, work_plan *plan) {
    const ptrdiff_t group = a->num_heads / a->num_kv_heads;
    ptrdiff_t num_rows = 0;
    for (ptrdiff_t s = 0; s < a->num_requests; s++) {
        tree_request *one = &plan->requests[s];
        one->first_row = a->row_starts[s];
        one->num_rows = a->num_rows[s];
        one->context = a->context_lens[s];
        one->words = a->ancestor_words + num_rows * a->num_words;
        cut(one);
        const ptrdiff_t queries = one->num_rows * group, parts = a->num_kv_heads * one->num_parts;
        if (one->num_parts > 1) plan->parts_size += parts * queries * (a->width + 2);
        if (queries > plan->most_queries) plan->most_queries = queries;
        plan->num_tasks += parts;
        plan->work += queries * a->num_kv_heads * (one->context + one->num_rows) * a->width;
        num_rows += one->num_rows;
    }
    plan->own_size = plan->most_queries * (2 * a->width + 1 + LANES) + a->width * TILE;
}

static void plan_tasks(const arguments *a, work_plan *plan) {
    float *parts = plan->parts;
    part_task *task = plan->tasks;
    for (ptrdiff_t s = 0; s < a->num_requests; s++) {
        tree_request *one = &plan->requests[s];
        one->parts = parts;
        one->missing = plan->missing + s * a->num_kv_heads;
        if (one->num_parts > 1)
            parts += a->num_heads * one->num_parts * one->num_rows * (a->width + 2);
        for (ptrdiff_t h = 0; h < a->num_kv_heads; h++) {
            one->missing[h] = one->num_parts;
            for (ptrdiff_t p = 0; p < one->num_parts; p++) *task++ = (part_task){s, h, p};
        }
    }
}

static void run(const arguments *a, const work_plan *plan, int num_threads) {
    ptrdiff_t next = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        query_block all = {.group = a->num_heads / a->num_kv_heads, .width = a->width};
        all.num_words = a->num_words;
        all.queries = plan->own + plan->own_size * omp_get_thread_num();
        all.sums = all.queries + plan->most_queries * a->width;
        all.highest = all.sums + plan->most_queries * a->width;
        all.totals = all.highest + plan->most_queries;
        all.tail = all.totals + plan->most_queries * LANES;
        for (;;) {
            const ptrdiff_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (task >= plan->num_tasks) break;
            const part_task *now = &plan->tasks[task];
            const tree_request *one = &plan->requests[now->request];
            run_task(a, one, now, &all);
            /* Who finishes a head's last part merges all: nobody waits for the others. */
            if (one->num_parts > 1 &&
                __atomic_sub_fetch(&one->missing[now->head], 1, __ATOMIC_ACQ_REL) == 0)
                merge_parts(a, one, now->head, &all);
        }
    }
}

int ddtree_paged_attention(const arguments *a, int num_threads) {
    if (a->num_requests == 0) return 0;
    work_plan plan = {.requests = malloc(sizeof(tree_request) * (size_t)a->num_requests)};
    if (plan.requests == NULL) return -1;
    plan_requests(a, &plan);
    if (plan.work < SMALL) num_threads = 1;
    const ptrdiff_t floats = plan.own_size * num_threads + plan.parts_size;
    plan.tasks = malloc(sizeof(part_task) * (size_t)plan.num_tasks);
    plan.own = malloc(sizeof(float) * (size_t)floats);
    plan.missing = malloc(sizeof(ptrdiff_t) * (size_t)(a->num_requests * a->num_kv_heads));
    const int ready = plan.tasks != NULL && plan.own != NULL && plan.missing != NULL;
    if (ready) {
        plan.parts = plan.own + plan.own_size * num_threads;
        plan_tasks(a, &plan);
        run(a, &plan, num_threads);
    }
    free(plan.missing);
    free(plan.own);
    free(plan.tasks);
    free(plan.requests);
    return ready ? 0 : -1;
}

#else

int ddtree_paged_attention(const ddtree_paged_attention_args *args, int num_threads) {
    (void)args, (void)num_threads;
    return -1;
}

#endif
