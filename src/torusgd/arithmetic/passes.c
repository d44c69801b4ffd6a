/* Passes over memory of portable arithmetic, each read once where torch takes several operators: see passes.py.

   Integers, products with powers of two and comparisons by the order of bits are exact. All else are single operations
   of IEEE 754, each rounded on its own, in the order of torch's: -ffp-contract=off keeps them single. */

#include <stdint.h>
#include <string.h>

#define ROWS_IN_32_BITS 256 /* of numbers up to 2**22 */
#define TILE 512
#define LANES 64

static inline int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* As integers in the order of floats: the bits below the sign of negative ones turned round. Its own inverse. */
static inline int32_t in_order(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

/* upper = floor((q + 128) / 256) and lower = q - 256 upper of q = round(x * scale), x[rows, columns]. The scale of
   element (row, i) is scale[row / same * down + i * across]. Adding 1.5 * 2**23 rounds to an integer, the low bits. */
void slices(const float *x, const float *scale, int64_t rows, int64_t columns, int64_t same, int64_t down,
            int64_t across, int8_t *upper, int8_t *lower, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * columns, *by = scale + row / same * down;
        int8_t *high = upper + row * columns, *low = lower + row * columns;
        for (int64_t i = 0; i < columns; i++) {
            int32_t bits = bits_of(from[i] * by[across ? i : 0] + 12582912.0f);
            low[i] = (int8_t)bits;
            high[i] = (int8_t)((bits + 128) >> 8);
        }
    }
}

/* out[n, height, width, columns], of strides in elements and columns side by side, = float(sum * down[n / same] *
   across[i]) of the sums lowest + 256 (left + right) + 65536 highest, each [n * height * width, columns]. */
void scaled(const int32_t *lowest, const int32_t *left, const int32_t *right, const int32_t *highest, const double *down,
            const double *across, int64_t count, int64_t height, int64_t width, int64_t columns, int64_t same,
            int64_t image, int64_t line, int64_t pixel, float *out, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < count * height * width; row++) {
        int64_t n = row / (height * width), at = row * columns;
        float *to = out + n * image + row / width % height * line + row % width * pixel;
        double by = down[n / same];
        for (int64_t i = 0; i < columns; i++) {
            double sum = lowest[at + i] + 256.0 * (left[at + i] + right[at + i]) + 65536.0 * highest[at + i];
            to[i] = (float)(sum * by * across[i]);
        }
    }
}

/* total[count] += the same sums. */
void added(const int32_t *lowest, const int32_t *left, const int32_t *right, const int32_t *highest, int64_t count,
           double *total, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++)
        total[i] += lowest[i] + 256.0 * (left[i] + right[i]) + 65536.0 * highest[i];
}

/* least and most [threads, outer, inner] over the middle of x[outer, middle, inner], of which each thread takes a run. */
void extremes(const float *x, int64_t outer, int64_t middle, int64_t inner, float *least, float *most, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++)
        for (int64_t o = 0; o < outer; o++) {
            int32_t *low = (int32_t *)least + (part * outer + o) * inner, *high = (int32_t *)most + (part * outer + o) * inner;
            int64_t begin = middle * part / threads, end = middle * (part + 1) / threads;
            const float *from = x + (o * middle + begin) * inner;
            if (inner == 1) {
                int32_t smallest = INT32_MAX, largest = INT32_MIN;
                for (int64_t r = 0; r < end - begin; r++) {
                    int32_t key = in_order(bits_of(from[r]));
                    smallest = key < smallest ? key : smallest;
                    largest = key > largest ? key : largest;
                }
                low[0] = in_order(smallest), high[0] = in_order(largest);
                continue;
            }
            for (int64_t i = 0; i < inner; i++)
                low[i] = INT32_MAX, high[i] = INT32_MIN;
            for (int64_t r = begin; r < end; r++, from += inner)
                for (int64_t i = 0; i < inner; i++) {
                    int32_t key = in_order(bits_of(from[i]));
                    low[i] = key < low[i] ? key : low[i];
                    high[i] = key > high[i] ? key : high[i];
                }
            for (int64_t i = 0; i < inner; i++)
                low[i] = in_order(low[i]), high[i] = in_order(high[i]);
        }
}

/* total[threads, outer, inner] of the multiples (x + offset) - offset, counted in their unit, over the middle of
   x[outer, middle, inner]; with a center of (x - center)**2 in place of x. */
void sums(const float *x, const float *offset, const float *center, int64_t outer, int64_t middle, int64_t inner,
          int64_t *total, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++)
        for (int64_t o = 0; o < outer; o++) {
            int64_t begin = middle * part / threads, end = middle * (part + 1) / threads;
            if (inner == 1) {
                const float *from = x + o * middle;
                const float own = offset[o], middles = center ? center[o] : 0;
                int64_t sum = 0;
                for (int64_t block = begin; block < end; block += ROWS_IN_32_BITS) {
                    int64_t stop = block + ROWS_IN_32_BITS < end ? block + ROWS_IN_32_BITS : end;
                    int32_t few = 0;
                    if (center)
                        for (int64_t r = block; r < stop; r++) {
                            float distance = from[r] - middles;
                            few += bits_of(distance * distance + own) - bits_of(own);
                        }
                    else
                        for (int64_t r = block; r < stop; r++)
                            few += bits_of(from[r] + own) - bits_of(own);
                    sum += few;
                }
                total[part * outer + o] = sum;
                continue;
            }
            for (int64_t first = 0; first < inner; first += TILE) {
                int64_t width = inner - first < TILE ? inner - first : TILE;
                int64_t *to = total + (part * outer + o) * inner + first;
                const float *own = offset + o * inner + first, *middles = center ? center + o * inner + first : 0;
                for (int64_t i = 0; i < width; i++)
                    to[i] = 0;
                for (int64_t block = begin; block < end; block += ROWS_IN_32_BITS) {
                    int64_t stop = block + ROWS_IN_32_BITS < end ? block + ROWS_IN_32_BITS : end;
                    int32_t few[TILE];
                    memset(few, 0, 4 * width);
                    for (int64_t r = block; r < stop; r++) {
                        const float *from = x + (o * middle + r) * inner + first;
                        if (middles)
                            for (int64_t i = 0; i < width; i++) {
                                float distance = from[i] - middles[i];
                                few[i] += bits_of(distance * distance + own[i]) - bits_of(own[i]);
                            }
                        else
                            for (int64_t i = 0; i < width; i++)
                                few[i] += bits_of(from[i] + own[i]) - bits_of(own[i]);
                    }
                    for (int64_t i = 0; i < width; i++)
                        to[i] += few[i];
                }
            }
        }
}

/* value[count] of the polynomial with so many coefficients, lowest degree first. */
void polynomial(const double *x, const double *coefficients, int64_t terms, int64_t count, double *value, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t width = count - first < LANES ? count - first : LANES;
        double at[LANES] = {0}, sum[LANES];
        memcpy(at, x + first, 8 * width);
        for (int i = 0; i < LANES; i++)
            sum[i] = coefficients[terms - 1];
        for (int64_t term = terms - 2; term >= 0; term--)
            for (int i = 0; i < LANES; i++)
                sum[i] = sum[i] * at[i] + coefficients[term];
        memcpy(value + first, sum, 8 * width);
    }
}
