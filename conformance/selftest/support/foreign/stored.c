/* Calls the library that it is linked with on stored matrices of exactly their size: Q4_0, or with -DGPTQ GPTQ; built
   with sanitizers, so that a read or write beside an array ends it with a message. */
#include <stdio.h>
#include <stdlib.h>

#include "lowbit.h"

static void *given; /* the memory that was last handed out */

static void *result(
    lowbit_call *call, const char *path, int32_t kind, int32_t dtype, int32_t ndim, const int64_t *shape)
{
    size_t size = dtype == LOWBIT_FLOAT16 ? 2 : 4;
    int32_t d;
    (void)call, (void)path, (void)kind;
    for (d = 0; d < ndim; d++)
        size *= (size_t)shape[d];
    return given = malloc(size);
}

static int64_t sizes[16][2], sized = 0;
static void *arrays[16];

/* An array of two dimensions, whose bytes are a record of `length` bytes again and again. */
static lowbit_value array(
    const char *path, int32_t dtype, size_t item, int64_t rows, int64_t columns, const char *record, size_t length)
{
    lowbit_value value = {sizeof value, LOWBIT_ARRAY, path, dtype, 2, NULL, NULL, NULL, 0, 0, NULL};
    size_t bytes = (size_t)(rows * columns) * item, i;
    char *data = malloc(bytes);
    for (i = 0; i < bytes; i++)
        data[i] = record[i % length];
    sizes[sized][0] = rows, sizes[sized][1] = columns;
    arrays[sized] = data;
    value.shape = sizes[sized++], value.data = data;
    return value;
}

static lowbit_value integer(const char *path, int64_t number)
{
    lowbit_value value = {sizeof value, LOWBIT_INTEGER, path, 0, 0, NULL, NULL, NULL, number, 0, NULL};
    return value;
}

static void run(const char *operation, int64_t count, const lowbit_value *values)
{
    char message[100] = "";
    lowbit_call call = {sizeof call, LOWBIT_ABI, operation, NULL, count, values, result, NULL, message, 100};
    if (lowbit_run(&call) != LOWBIT_OK) {
        printf("%s fails: %s\n", operation, message);
        exit(1);
    }
    while (sized)
        free(arrays[--sized]);
}

/* Each element of the result has these bytes. */
static void check(int64_t count, size_t item, const char *expected)
{
    int64_t i;
    for (i = 0; i < count; i++)
        if (memcmp((const char *)given + i * (int64_t)item, expected, item)) {
            printf("element %d is wrong\n", (int)i);
            exit(1);
        }
    free(given);
}

#ifdef GPTQ
/* Codes of 3 and zeros of 1, with scales and activations of 1: each sum is 2 K, here 128. */
static void multiply(int64_t N)
{
    lowbit_value values[7];
    values[0] = integer("weights.rows", 64);
    values[1] = integer("weights.columns", N);
    values[2] = array("x", LOWBIT_FLOAT16, 2, 1, 64, "\x00\x3c", 2);
    values[3] = array("weights.qweight", LOWBIT_INT32, 4, 8, N, "\x33", 1);
    values[4] = array("weights.qzeros", LOWBIT_INT32, 4, 2, N / 8, "\x11", 1);
    values[5] = array("weights.scales", LOWBIT_FLOAT16, 2, 2, N, "\x00\x3c", 2);
    values[6] = array("weights.g_idx", LOWBIT_INT32, 4, 1, 64, "\1\0\0\0\0\0\0\0", 8);
    run("linear.gemv", 7, values);
    check(N, 2, "\x00\x58");
}
#else
#define D "\x00\x3c" /* 1 */
#define EIGHT(byte) byte byte byte byte byte byte byte byte
#define CODES EIGHT("\x99") EIGHT("\x99") /* 9, which stands for 1 */

/* Scales, weights and activations of 1: each sum is K, here 64. */
static void multiply(int64_t N)
{
    lowbit_value values[5];
    values[0] = integer("weights.rows", 64);
    values[1] = integer("weights.columns", N);
    values[2] = array("weights.blocks", LOWBIT_UINT8, 1, N, 2 * 18, D CODES, 18);
    values[3] = array("x", LOWBIT_FLOAT32, 4, 1, 64, "\x00\x00\x80\x3f", 4);
    run("linear.gemv", 4, values);
    check(N, 4, "\x00\x00\x80\x42");
    values[2] = array("weights.blocks", LOWBIT_UINT8, 1, N, 2 * 18, D CODES, 18);
    values[3] = array("x.blocks", LOWBIT_UINT8, 1, 3, 2 * 34, D EIGHT("\1") EIGHT("\1") EIGHT("\1") EIGHT("\1"), 34);
    values[4] = integer("x.columns", 3);
    run("linear.gemm_cast", 5, values);
    check(3 * N, 4, "\x00\x00\x80\x42");
}
#endif

int main(void)
{
    int64_t N;
    for (N = 8; N <= 40; N += 8)
        multiply(N);
    puts("kept to its memory");
    return 0;
}
