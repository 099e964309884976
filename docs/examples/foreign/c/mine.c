/*
 * A backend in C: packing and unpacking of codes, and one product with 4-bit weights.
 *
 *     cc -std=c99 -O2 -shared -fPIC -I"$(python -m lowbit_foreign)" mine.c -o libmine.so
 *     lowbit conformance --library ./libmine.so
 */
#include <stdlib.h>
#include <string.h>

#include "lowbit.h"

static const char CAPABILITIES[] =
    "{\"name\": \"mine-c\", \"version\": \"1.0\", \"concurrent\": true, \"operations\": {"
    "  \"packing.pack\": {},"
    "  \"packing.unpack\": {},"
    "  \"linear.qgemv\": {"
    "    \"limits\": {\"bits\": [4], \"convention\": [\"minimum\"], \"scale_dtype\": [\"float32\"]},"
    "    \"arithmetic\": {\"form\": \"dequantised\", \"accumulator\": \"float32\", \"roundings\": \"any_order\"}}}}";

uint32_t lowbit_abi_version(void)
{
    return LOWBIT_ABI;
}

const char *lowbit_capabilities(void)
{
    return CAPABILITIES;
}

/* Codes (uint8, K x N) to words (uint32, K*bits/32 x N). Each column is one stream of bits, least significant first;
   a code of 3 bits may begin in one word and end in the next. */
static int32_t pack(lowbit_call *call)
{
    const uint8_t *codes = lowbit_data(call, "codes", LOWBIT_UINT8);
    int64_t rows = lowbit_size(call, "codes", 0), columns = lowbit_size(call, "codes", 1);
    int64_t bits = lowbit_integer(call, "bits", 0), k, n;
    int64_t shape[2] = {rows * bits / 32, columns};
    uint32_t *words = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 2, shape);
    if (!codes || !words)
        return LOWBIT_FAILED;
    memset(words, 0, sizeof *words * (size_t)(shape[0] * shape[1]));
    for (k = 0; k < rows; k++) {
        int64_t word = k * bits / 32, shift = k * bits % 32;
        for (n = 0; n < columns; n++) {
            uint64_t code = (uint64_t)codes[k * columns + n] << shift;
            words[word * columns + n] |= (uint32_t)code;
            if (shift + bits > 32)
                words[(word + 1) * columns + n] |= (uint32_t)(code >> 32);
        }
    }
    return LOWBIT_OK;
}

/* The other way. */
static int32_t unpack(lowbit_call *call)
{
    const uint32_t *words = lowbit_data(call, "words", LOWBIT_UINT32);
    int64_t bits = lowbit_integer(call, "bits", 0), columns = lowbit_size(call, "words", 1), k, n;
    int64_t shape[2] = {lowbit_size(call, "words", 0) * 32 / (bits ? bits : 1), columns};
    uint8_t *codes = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT8, 2, shape);
    if (!words || !codes)
        return LOWBIT_FAILED;
    for (k = 0; k < shape[0]; k++) {
        int64_t word = k * bits / 32, shift = k * bits % 32;
        for (n = 0; n < columns; n++) {
            uint64_t code = words[word * columns + n];
            if (shift + bits > 32)
                code |= (uint64_t)words[(word + 1) * columns + n] << 32;
            codes[k * columns + n] = (uint8_t)((code >> shift) & ((1u << bits) - 1));
        }
    }
    return LOWBIT_OK;
}

/* Weights are made ready once. This copies them, for the caller's arrays may not be used after the call; a real kernel
   would put them into an order of its own here. */
typedef struct {
    int64_t rows, columns, group_size;
    uint32_t *words;
    float *scales, *zeros;
} matrix;

static void *copy(const lowbit_call *call, const char *path)
{
    const lowbit_value *value = lowbit_argument(call, path); /* a matrix of 4-byte elements */
    size_t size = 4 * (size_t)(value->shape[0] * value->shape[1]);
    void *memory = malloc(size);
    return memory ? memcpy(memory, value->data, size) : NULL;
}

int32_t lowbit_prepare(lowbit_call *call, void **handle)
{
    matrix *made = calloc(1, sizeof *made);
    if (!made)
        return lowbit_say(call, LOWBIT_FAILED, "no memory");
    made->rows = lowbit_integer(call, "matrix.rows", 0);
    made->columns = lowbit_size(call, "matrix.words", 1);
    made->group_size = lowbit_integer(call, "matrix.group_size", 0);
    made->words = copy(call, "matrix.words");
    made->scales = copy(call, "matrix.scales");
    made->zeros = copy(call, "matrix.zeros");
    if (!made->words || !made->scales || !made->zeros) {
        lowbit_release(made);
        return lowbit_say(call, LOWBIT_FAILED, "no memory");
    }
    *handle = made;
    return LOWBIT_OK;
}

void lowbit_release(void *handle)
{
    matrix *made = handle;
    free(made->words);
    free(made->scales);
    free(made->zeros);
    free(made);
}

/* y = x W with w = scale * code + minimum, one row of W at a time: each y is a sum of `rows` products in float, which
   is what `dequantised`, `float32` and `any_order` declare. */
static int32_t qgemv(lowbit_call *call)
{
    const matrix *w = call->handle;
    const float *x = lowbit_data(call, "x", LOWBIT_FLOAT32);
    float *y = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_FLOAT32, 1, &w->columns);
    int64_t k, n;
    if (!x || !y)
        return LOWBIT_FAILED;
    for (n = 0; n < w->columns; n++)
        y[n] = 0;
    for (k = 0; k < w->rows; k++) {
        const uint32_t *words = w->words + k / 8 * w->columns;
        const float *scale = w->scales + k / w->group_size * w->columns;
        const float *minimum = w->zeros + k / w->group_size * w->columns;
        for (n = 0; n < w->columns; n++) {
            float code = (float)(words[n] >> k % 8 * 4 & 15);
            y[n] += x[k] * (scale[n] * code + minimum[n]);
        }
    }
    return LOWBIT_OK;
}

int32_t lowbit_run(lowbit_call *call)
{
    if (!strcmp(call->operation, "packing.pack"))
        return pack(call);
    if (!strcmp(call->operation, "packing.unpack"))
        return unpack(call);
    if (!strcmp(call->operation, "linear.qgemv"))
        return qgemv(call);
    return LOWBIT_NOT_DECLARED;
}
