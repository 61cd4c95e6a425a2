#include "engine/cost.h"

#include <math.h>

static const uint32_t NODES[ENG_COST_NODES] = {1,  2,   3,   4,   5,   6,   7,   8,   9,
                                               10, 12,  14,  16,  20,  24,  32,  48,  64,
                                               96, 128, 192, 256, 384, 512, 768, 1024};
#define BUCKET_TOKENS 512 /* of the first bucket */
#define RATE_MIN 0.06f    /* weight of the newest observation, once there are many */
#define STEP_MAX 2.0f     /* an observation counts as at most so many times what was expected */
#define SEEN_MIN 2.0f
#define SEEN_TRUSTED 16.0f /* observations from which on a mean is taken for what it says */
#define HOPE 0.3f          /* what a number of rows that was never seen may take less */
#define ROW_SHARE 0.1 /* what a row more is taken to cost before two numbers of rows were seen */
#define NS_MAX 1e13f
#define SEEN_MAX 1e6f

static uint32_t bucket_of(uint32_t context)
{
    uint32_t bucket = 0;
    for (uint32_t limit = BUCKET_TOKENS; context >= limit && bucket + 1 < ENG_COST_BUCKETS;
         limit *= 2)
        bucket++;
    return bucket;
}

/* The node at or below `rows`, and how far `rows` is on the way to the next, in [0, 1). */
static uint32_t node_below(uint32_t rows, float *way)
{
    uint32_t n = 0;
    while (n + 1 < ENG_COST_NODES && NODES[n + 1] <= rows)
        n++;
    *way = n + 1 < ENG_COST_NODES && rows > NODES[n]
               ? (float)(rows - NODES[n]) / (float)(NODES[n + 1] - NODES[n])
               : 0;
    return n;
}

static bool has_any(const eng_cost *cost, uint32_t bucket)
{
    for (uint32_t n = 0; n < ENG_COST_NODES; n++)
        if (cost->ns[bucket][n] > 0)
            return true;
    return false;
}

/* The nearest bucket in which anything was seen, itself first, then the shorter one. */
static bool nearest(const eng_cost *cost, uint32_t *bucket)
{
    for (uint32_t away = 0; away < ENG_COST_BUCKETS; away++) {
        if (*bucket >= away && has_any(cost, *bucket - away)) {
            *bucket -= away;
            return true;
        }
        if (*bucket + away < ENG_COST_BUCKETS && has_any(cost, *bucket + away)) {
            *bucket += away;
            return true;
        }
    }
    return false;
}

/* On the line through the neighbours that were seen. */
static double line(const float *ns, double rows)
{
    uint32_t below = UINT32_MAX, above = UINT32_MAX, before = UINT32_MAX;
    for (uint32_t n = 0; n < ENG_COST_NODES; n++) {
        if (ns[n] <= 0)
            continue;
        if (NODES[n] <= rows) {
            before = below;
            below = n;
        } else if (above == UINT32_MAX) {
            above = n;
        }
    }
    if (below == UINT32_MAX) /* fewer rows than were seen: the share that a row has at most */
        return (double)ns[above] * (1 + ROW_SHARE * rows) / (1 + ROW_SHARE * NODES[above]);
    if (above != UINT32_MAX) {
        double way = (rows - NODES[below]) / (NODES[above] - NODES[below]);
        return (double)ns[below] + way * ((double)ns[above] - (double)ns[below]);
    }
    double slope = ROW_SHARE * (double)ns[below] / (1 + ROW_SHARE * NODES[below]);
    if (before != UINT32_MAX)
        slope = fmax(0, ((double)ns[below] - (double)ns[before]) / (NODES[below] - NODES[before]));
    return (double)ns[below] + slope * (rows - NODES[below]);
}

static void scale(float *ns, float factor)
{
    *ns = fminf(*ns * factor, NS_MAX);
}

static void move(eng_cost *cost, uint32_t bucket, uint32_t node, float weight, float ratio,
                 float ns)
{
    float *at = cost->ns[bucket], *seen = &cost->seen[bucket][node];
    if (weight <= 0)
        return;
    if (at[node] <= 0) {
        if (weight < 0.5f) /* it is nearer to the other one */
            return;
        at[node] = ns;
        *seen = weight;
        return;
    }
    bool fresh = *seen < SEEN_MIN;
    *seen = fminf(*seen + weight, SEEN_MAX);
    float change = fmaxf(1 / fmaxf(*seen, 1), RATE_MIN) * weight * (ratio - 1);
    /* The whole bucket moves half as far, since most changes are the machine's: half in the
     * logarithm, so that a node's wobble comes to nothing in the others. (With half the factor's
     * distance from 1 it adds up: rows that are not run double within 10^5 passes, and drafts seem
     * never to pay again.) */
    for (uint32_t n = 0; n < ENG_COST_NODES && !fresh; n++)
        if (n != node)
            scale(&at[n], sqrtf(1 + change));
    scale(&at[node], 1 + change);
}

/* A bucket begins as its neighbour, as much slower as its first pass was. */
static void begin(eng_cost *cost, uint32_t bucket, uint32_t rows, float taken)
{
    uint32_t from = bucket;
    if (!nearest(cost, &from) || from == bucket)
        return;
    float factor = fminf(fmaxf(taken / (float)line(cost->ns[from], rows), 0.5f), 2 * STEP_MAX);
    for (uint32_t n = 0; n < ENG_COST_NODES; n++) {
        cost->ns[bucket][n] = cost->ns[from][n];
        scale(&cost->ns[bucket][n], factor);
    }
}

void eng_cost_observe(eng_cost *cost, uint32_t rows, uint32_t context, uint64_t ns)
{
    if (rows == 0)
        return;
    float way, taken = fminf(fmaxf((float)ns, 1), NS_MAX);
    uint32_t bucket = bucket_of(context), node = node_below(rows, &way);
    float ratio = 1;
    begin(cost, bucket, rows, taken);
    if (has_any(cost, bucket))
        ratio = fminf(taken / (float)line(cost->ns[bucket], rows), STEP_MAX);
    move(cost, bucket, node, 1 - way, ratio, taken);
    if (node + 1 < ENG_COST_NODES)
        move(cost, bucket, node + 1, way, ratio, taken);
}

double eng_cost_of(const eng_cost *cost, uint32_t rows, uint32_t context)
{
    uint32_t bucket = bucket_of(context);
    if (rows == 0 || !nearest(cost, &bucket))
        return 0;
    /* Measured times wobble; a pass does not get cheaper by a row. */
    double most = line(cost->ns[bucket], rows);
    for (uint32_t n = 0; n < ENG_COST_NODES && NODES[n] < rows; n++)
        if (cost->ns[bucket][n] > 0 && (double)cost->ns[bucket][n] > most)
            most = (double)cost->ns[bucket][n];
    return most;
}

double eng_cost_hope(const eng_cost *cost, uint32_t rows, uint32_t context)
{
    float way;
    const float *seen = cost->seen[bucket_of(context)];
    uint32_t node = node_below(rows, &way), trusted = node;
    float known = fminf(seen[node] / SEEN_TRUSTED, 1);
    while (trusted > 0 && seen[trusted] < SEEN_TRUSTED)
        trusted--;
    return fmax(eng_cost_of(cost, rows, context) * (1 - (double)(HOPE * (1 - known))),
                eng_cost_of(cost, NODES[trusted], context) * (trusted < node));
}

bool eng_cost_known(const eng_cost *cost, uint32_t rows, uint32_t context)
{
    float way;
    uint32_t bucket = bucket_of(context), node = node_below(rows, &way);
    return cost->seen[bucket][node] >= SEEN_MIN ||
           (way > 0 && cost->seen[bucket][node + 1] >= SEEN_MIN);
}

uint32_t eng_cost_rows(const eng_cost *cost, double ns, uint32_t context, uint32_t rows_max)
{
    uint32_t lo = 1, hi = rows_max;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo + 1) / 2;
        if (eng_cost_of(cost, mid, context) <= ns)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

bool eng_cost_check(const eng_cost *cost)
{
    for (uint32_t b = 0; b < ENG_COST_BUCKETS; b++)
        for (uint32_t n = 0; n < ENG_COST_NODES; n++)
            if (!(cost->ns[b][n] >= 0 && cost->ns[b][n] <= NS_MAX && cost->seen[b][n] >= 0 &&
                  cost->seen[b][n] <= SEEN_MAX))
                return false;
    return true;
}
