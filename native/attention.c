#include "attention.h"

#include "simd.h"

#ifdef DDTREE_AVX2

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#define LANES 8
#define BLOCK 64     /* keys whose vectors stay in the first-level cache for all queries of a task */
#define TASK_ROWS 4  /* rows of a task */
#define MAX_GROUP 64 /* query heads that share keys */
/* Below so many multiply-adds waking the threads costs more than they save. */
#define SMALL 65536

/* Keys that one row sees: the open ones, then `more`, indices in rising order. */
typedef struct {
    ptrdiff_t num_open, num_more;
    const int *more;
} seen_keys;

static ptrdiff_t num_seen(const seen_keys *seen) { return seen->num_open + seen->num_more; }

static ptrdiff_t key_at(const seen_keys *seen, ptrdiff_t place) {
    return place < seen->num_open ? place : seen->more[place - seen->num_open];
}

static ptrdiff_t rounded_up(ptrdiff_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Scores of 8 keys for one query: each key's is computed alike, whatever its place among the 8. */
DDTREE_TARGET static __m256 eight_scores(const float *query, const float *const keys[LANES],
                                         ptrdiff_t width) {
    __m256 sum[LANES];
    _Pragma("GCC unroll 8") for (int k = 0; k < LANES; k++) sum[k] = _mm256_setzero_ps();
    for (ptrdiff_t c = 0; c < width; c += LANES) {
        const __m256 q = _mm256_loadu_ps(query + c);
        _Pragma("GCC unroll 8") for (int k = 0; k < LANES; k++) sum[k] =
            _mm256_fmadd_ps(q, _mm256_loadu_ps(keys[k] + c), sum[k]);
    }
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(sum[4], sum[5]), _mm256_hadd_ps(sum[6], sum[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/* Scores of the places [first, end) of what one query sees; `first` is a multiple of 8. */
DDTREE_TARGET static void score_block(const ddtree_attention_args *a, const float *query,
                                      const float *keys, const seen_keys *seen, ptrdiff_t first,
                                      ptrdiff_t end, float *scores) {
    const __m256 scale = _mm256_set1_ps(a->scale);
    for (ptrdiff_t place = first; place < end; place += LANES) {
        const float *at[LANES];
        for (int k = 0; k < LANES; k++) /* beyond the end: any key, overwritten below */
            at[k] = keys + a->key_row * key_at(seen, place + k < end ? place + k : end - 1);
        _mm256_storeu_ps(scores + place, _mm256_mul_ps(scale, eight_scores(query, at, a->width)));
    }
}

/* Turn scores into weights that are not yet divided by their sum, which is returned. */
DDTREE_TARGET static float soften(float *scores, ptrdiff_t count) {
    const ptrdiff_t padded = rounded_up(count);
    for (ptrdiff_t i = count; i < padded; i++) scores[i] = -INFINITY;
    __m256 most = _mm256_set1_ps(-INFINITY);
    for (ptrdiff_t i = 0; i < padded; i += LANES)
        most = _mm256_max_ps(most, _mm256_loadu_ps(scores + i));
    float lanes[LANES], highest = -INFINITY;
    _mm256_storeu_ps(lanes, most);
    for (int i = 0; i < LANES; i++) highest = lanes[i] > highest ? lanes[i] : highest;
    const __m256 shift = _mm256_set1_ps(highest);
    __m256 sum = _mm256_setzero_ps();
    for (ptrdiff_t i = 0; i < padded; i += LANES) {
        const __m256 weight = ddtree_exp(_mm256_sub_ps(_mm256_loadu_ps(scores + i), shift));
        _mm256_storeu_ps(scores + i, weight);
        sum = _mm256_add_ps(sum, weight);
    }
    return ddtree_sum(sum);
}

/* Add the weighted values of the places [first, end) to `out`, one key after the other. */
DDTREE_TARGET static void add_values(const ddtree_attention_args *a, const float *values,
                                     const seen_keys *seen, const float *weights, ptrdiff_t first,
                                     ptrdiff_t end, float *out) {
    ptrdiff_t c = 0;
    for (; c + 8 * LANES <= a->width; c += 8 * LANES) {
        __m256 sum[8];
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) sum[i] =
            _mm256_loadu_ps(out + c + LANES * i);
        for (ptrdiff_t place = first; place < end; place++) {
            const float *value = values + a->value_row * key_at(seen, place) + c;
            const __m256 weight = _mm256_broadcast_ss(weights + place);
            _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) sum[i] =
                _mm256_fmadd_ps(weight, _mm256_loadu_ps(value + LANES * i), sum[i]);
        }
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++)
            _mm256_storeu_ps(out + c + LANES * i, sum[i]);
    }
    for (; c < a->width; c += LANES) {
        __m256 sum = _mm256_loadu_ps(out + c);
        for (ptrdiff_t place = first; place < end; place++) {
            const float *value = values + a->value_row * key_at(seen, place) + c;
            sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + place), _mm256_loadu_ps(value), sum);
        }
        _mm256_storeu_ps(out + c, sum);
    }
}

/* What a row sees behind the open keys; `more` has room for all of them. */
static seen_keys look(const ddtree_attention_args *a, ptrdiff_t row, int *more) {
    seen_keys seen = {a->mask == NULL ? a->num_keys : a->num_open, 0, more};
    for (ptrdiff_t key = seen.num_open; key < a->num_keys; key++)
        if (a->mask[row * a->mask_row + key] > DDTREE_HIDDEN) more[seen.num_more++] = (int)key;
    return seen;
}

/* Heads [first_head, end_head) of one key-value head, for rows [first_row, end_row). */
DDTREE_TARGET static void run_task(const ddtree_attention_args *a, ptrdiff_t first_head,
                                   ptrdiff_t end_head, ptrdiff_t first_row, ptrdiff_t end_row,
                                   float *scores, int *more) {
    const ptrdiff_t kv_head = first_head * a->num_kv_heads / a->num_heads;
    const float *keys = a->keys + kv_head * a->key_head;
    const float *values = a->values + kv_head * a->value_head;
    const ptrdiff_t num_heads = end_head - first_head, length = rounded_up(a->num_keys);
    seen_keys seen[TASK_ROWS];
    ptrdiff_t most = 0;
    for (ptrdiff_t r = 0; r < end_row - first_row; r++) {
        seen[r] = look(a, first_row + r, more + r * a->num_keys);
        most = num_seen(&seen[r]) > most ? num_seen(&seen[r]) : most;
    }
#define EACH_QUERY                                                                                 \
    for (ptrdiff_t r = 0; r < end_row - first_row; r++)                                            \
        for (ptrdiff_t h = 0; h < num_heads; h++)
#define SCORES (scores + (r * num_heads + h) * length)
#define OUT (a->out + ((first_row + r) * a->num_heads + first_head + h) * a->width)
#define END (first + BLOCK < num_seen(&seen[r]) ? first + BLOCK : num_seen(&seen[r]))
    for (ptrdiff_t first = 0; first < most; first += BLOCK)
        EACH_QUERY if (first < num_seen(&seen[r])) score_block(
            a, a->query + (first_head + h) * a->query_head + (first_row + r) * a->query_row, keys,
            &seen[r], first, END, SCORES);
    float inverse[TASK_ROWS * MAX_GROUP];
    EACH_QUERY {
        const ptrdiff_t count = num_seen(&seen[r]);
        if (a->mask != NULL)
            for (ptrdiff_t i = seen[r].num_open; i < count; i++)
                SCORES[i] += a->mask[(first_row + r) * a->mask_row + key_at(&seen[r], i)];
        inverse[r * num_heads + h] = count == 0 ? 0.0f : 1.0f / soften(SCORES, count);
        for (ptrdiff_t c = 0; c < a->width; c++) OUT[c] = 0.0f;
    }
    for (ptrdiff_t first = 0; first < most; first += BLOCK)
        EACH_QUERY if (first < num_seen(&seen[r]))
            add_values(a, values, &seen[r], SCORES, first, END, OUT);
    EACH_QUERY for (ptrdiff_t c = 0; c < a->width; c++) OUT[c] *= inverse[r * num_heads + h];
#undef EACH_QUERY
#undef SCORES
#undef OUT
#undef END
}

/* The arguments of one request. */
static ddtree_attention_args one_request(const ddtree_attention_args *all, ptrdiff_t request) {
    ddtree_attention_args a = *all;
    a.query += request * a.query_request;
    a.keys += request * a.key_request;
    a.values += request * a.value_request;
    if (a.mask != NULL) a.mask += request * a.mask_request;
    a.out += request * a.num_rows * a.num_heads * a.width;
    return a;
}

int ddtree_attention(const ddtree_attention_args *a, int num_threads) {
    const ptrdiff_t group = a->num_heads / a->num_kv_heads;
    const ptrdiff_t row_tasks = (a->num_rows + TASK_ROWS - 1) / TASK_ROWS;
    /* A task is a group of heads that share keys; where such tasks are few, a single head. */
    const ptrdiff_t groups = a->num_requests * row_tasks * a->num_kv_heads;
    const ptrdiff_t heads = groups >= 4 * num_threads && group <= MAX_GROUP ? group : 1;
    const ptrdiff_t head_tasks = a->num_heads / heads;
    const ptrdiff_t num_tasks = a->num_requests * row_tasks * head_tasks;
    const ptrdiff_t rows = a->num_requests * a->num_rows;
    const int wake = rows * a->num_heads * a->num_keys * a->width > SMALL;
    int failed = 0;
#pragma omp parallel num_threads(num_threads) if (wake) reduction(| : failed)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        float *scores = malloc(sizeof(float) * (size_t)(TASK_ROWS * heads * rounded_up(a->num_keys)));
        int *more = malloc(sizeof(int) * (size_t)(TASK_ROWS * a->num_keys));
        if (scores == NULL || more == NULL) {
            failed = 1;
        } else {
            const ptrdiff_t end = num_tasks * (thread + 1) / threads;
            for (ptrdiff_t task = num_tasks * thread / threads; task < end; task++) {
                const ptrdiff_t row = task % row_tasks * TASK_ROWS, last = a->num_rows;
                const ptrdiff_t head = task / row_tasks % head_tasks * heads;
                const ddtree_attention_args one = one_request(a, task / row_tasks / head_tasks);
                run_task(&one, head, head + heads, row,
                         row + TASK_ROWS < last ? row + TASK_ROWS : last, scores, more);
            }
        }
        free(scores);
        free(more);
    }
    return failed ? -1 : 0;
}

#else

int ddtree_attention(const ddtree_attention_args *args, int num_threads) {
    (void)args, (void)num_threads;
    return -1;
}

#endif
