/*
 * GGUF's Q4_0 in C: a vector of float times the matrix, and vectors that were cast to Q8_0 times the matrix.
 *
 *     cc -std=c99 -O2 -shared -fPIC -I"$(python -m lowbit_foreign)" q4_0.c -o libq4_0.so -lm
 *     lowbit conformance --library ./libq4_0.so
 *
 * A matrix K x N has N rows of blocks; a block is 32 weights d * (q - 8) along K.
 */
#include <math.h>
#include <string.h>

#include "lowbit.h"

enum { BLOCK = 32, Q4_0 = 18, Q8_0 = 34 }; /* elements of a block, and bytes: 2 of d, then the codes */

uint32_t lowbit_abi_version(void) { return LOWBIT_ABI; }

/* Nothing is rounded on the way to a weight: d has 11 bits and q - 8 has 4, so that their product is a float. So the
   weights are "exact", and what remains to be declared is the sum. The profile is a claim, which a run of the whole
   suite certifies or refutes. */
const char *lowbit_capabilities(void)
{
    return "{\"name\": \"q4_0-c\", \"version\": \"1.0\", \"concurrent\": true,"
           " \"profiles\": [\"lowbit-1.1/q4_0-q8_0\"], \"operations\": {"
           "  \"linear.gemv\": {"
           "    \"limits\": {\"format\": [\"q4_0\"], \"activations\": [\"float32\"], \"result\": [\"float32\"]},"
           "    \"arithmetic\": {\"form\": \"dequantised\", \"accumulator\": \"float32\","
           "                     \"roundings\": \"any_order\", \"weights\": \"exact\"}},"
           "  \"linear.gemm_cast\": {"
           "    \"limits\": {\"format\": [\"q4_0\"], \"activations\": [\"q8_0\"], \"result\": [\"float32\"]},"
           "    \"arithmetic\": {\"form\": \"dequantised\", \"accumulator\": \"float32\","
           "                     \"roundings\": {\"rows\": 0.03125, \"groups\": 0, \"constant\": 2},"
           "                     \"weights\": \"exact\"}}}}";
}

/* The float16 d of a block, which may lie at an odd address. */
static float scale(const uint8_t *block)
{
    int bits = block[0] | block[1] << 8, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    return bits >> 15 ? -size : size; /* infinity and NaN are refused before a library is called */
}

/* Byte i holds element i in its low half, and element i + 16 in its high half. */
static int weight(const uint8_t *block, int element)
{
    int pair = block[2 + element % 16];
    return (element < 16 ? pair & 15 : pair >> 4) - 8;
}

/* y = x W, N sums of K products. */
static int32_t gemv(lowbit_call *call)
{
    const float *x = lowbit_data(call, "x", LOWBIT_FLOAT32);
    const uint8_t *blocks = lowbit_data(call, "weights.blocks", LOWBIT_UINT8);
    int64_t rows = lowbit_integer(call, "weights.rows", 0), columns = lowbit_integer(call, "weights.columns", 0), k, n;
    float *y = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_FLOAT32, 1, &columns);
    if (!x || !blocks || !y)
        return LOWBIT_FAILED;
    for (n = 0; n < columns; n++) {
        float sum = 0;
        for (k = 0; k < rows; k += BLOCK, blocks += Q4_0) {
            float d = scale(blocks);
            int i;
            for (i = 0; i < BLOCK; i++)
                sum += x[k + i] * (d * (float)weight(blocks, i));
        }
        y[n] = sum;
    }
    return LOWBIT_OK;
}

/* Y = X W for T vectors that are blocks themselves. The sum of a block is one of integers, and exact; it is rounded
   where the two scales are applied, and where the sums of K / 32 blocks are added. */
static int32_t gemm_cast(lowbit_call *call)
{
    const uint8_t *x = lowbit_data(call, "x.blocks", LOWBIT_UINT8);
    const uint8_t *w = lowbit_data(call, "weights.blocks", LOWBIT_UINT8);
    int64_t count = lowbit_integer(call, "weights.rows", 0) / BLOCK, t, n, b;
    int64_t shape[2] = {lowbit_integer(call, "x.columns", 0), lowbit_integer(call, "weights.columns", 0)};
    float *y = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_FLOAT32, 2, shape);
    if (!x || !w || !y)
        return LOWBIT_FAILED;
    for (t = 0; t < shape[0]; t++)
        for (n = 0; n < shape[1]; n++) {
            float sum = 0;
            for (b = 0; b < count; b++) {
                const uint8_t *of_x = x + (t * count + b) * Q8_0, *of_w = w + (n * count + b) * Q4_0;
                int i, dot = 0;
                for (i = 0; i < BLOCK; i++)
                    dot += (int8_t)of_x[2 + i] * weight(of_w, i);
                sum += scale(of_x) * scale(of_w) * (float)dot; /* two scales of 11 bits: 22, still exact */
            }
            y[t * shape[1] + n] = sum;
        }
    return LOWBIT_OK;
}

int32_t lowbit_run(lowbit_call *call)
{
    if (!strcmp(call->operation, "linear.gemv"))
        return gemv(call);
    if (!strcmp(call->operation, "linear.gemm_cast"))
        return gemm_cast(call);
    return LOWBIT_NOT_DECLARED;
}
