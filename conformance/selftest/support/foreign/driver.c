/* Calls the library that it is linked with on arrays of exactly their size, and packs and unpacks every width; built
   with sanitizers, so that a read or write beside an array, or a leak, ends it with a message. */
#include <stdio.h>
#include <stdlib.h>

#include "lowbit.h"

static void *given; /* the memory that was last handed out */

static void *result(
    lowbit_call *call, const char *path, int32_t kind, int32_t dtype, int32_t ndim, const int64_t *shape)
{
    size_t size = dtype == LOWBIT_UINT8 ? 1 : 4;
    int32_t d;
    (void)call, (void)path, (void)kind;
    for (d = 0; d < ndim; d++)
        size *= (size_t)shape[d];
    return given = malloc(size);
}

static lowbit_value array(const char *path, int32_t dtype, int32_t ndim, const int64_t *shape, const void *data)
{
    lowbit_value value = {sizeof value, LOWBIT_ARRAY, path, dtype, ndim, shape, NULL, data, 0, 0, NULL};
    return value;
}

static lowbit_value integer(const char *path, int64_t number)
{
    lowbit_value value = {sizeof value, LOWBIT_INTEGER, path, 0, 0, NULL, NULL, NULL, number, 0, NULL};
    return value;
}

static void run(const char *operation, void *handle, int64_t count, const lowbit_value *values)
{
    char message[100] = "";
    lowbit_call call = {sizeof call, LOWBIT_ABI, operation, handle, count, values, result, NULL, message, 100};
    if (lowbit_run(&call) != LOWBIT_OK) {
        printf("%s fails: %s\n", operation, message);
        exit(1);
    }
}

static void pack_and_unpack(int64_t bits, int64_t rows, int64_t columns)
{
    int64_t shape[2] = {rows, columns}, words_shape[2] = {rows * bits / 32, columns}, i;
    uint8_t *codes = malloc((size_t)(rows * columns)), *again;
    uint32_t *words;
    lowbit_value values[2];
    for (i = 0; i < rows * columns; i++)
        codes[i] = (uint8_t)(i * 7 % (1 << bits));
    values[0] = array("codes", LOWBIT_UINT8, 2, shape, codes);
    values[1] = integer("bits", bits);
    run("packing.pack", NULL, 2, values);
    words = given;
    values[0] = array("words", LOWBIT_UINT32, 2, words_shape, words);
    run("packing.unpack", NULL, 2, values);
    again = given;
    if (memcmp(codes, again, (size_t)(rows * columns))) {
        printf("%d bits do not come back\n", (int)bits);
        exit(1);
    }
    free(codes), free(words), free(again);
}

/* Scales of 1, minima of 0 and codes that are all 1 in 16 rows of two groups: each y is the sum of x. */
static void multiply(int64_t columns)
{
    int64_t words_shape[2] = {2, columns}, scales_shape[2] = {2, columns}, length = 16, i;
    uint32_t *words = malloc(8 * (size_t)columns);
    float *scales = malloc(8 * (size_t)columns), *zeros = calloc(2 * (size_t)columns, 4), x[16], *y;
    void *handle;
    char message[100];
    lowbit_value values[5];
    lowbit_call call = {sizeof call, LOWBIT_ABI, "linear.qgemv", NULL, 5, values, result, NULL, message, 100};
    for (i = 0; i < 2 * columns; i++)
        words[i] = 0x11111111u, scales[i] = 1;
    for (i = 0; i < 16; i++)
        x[i] = (float)i;
    values[0] = integer("matrix.rows", 16);
    values[1] = integer("matrix.group_size", 8);
    values[2] = array("matrix.words", LOWBIT_UINT32, 2, words_shape, words);
    values[3] = array("matrix.scales", LOWBIT_FLOAT32, 2, scales_shape, scales);
    values[4] = array("matrix.zeros", LOWBIT_FLOAT32, 2, scales_shape, zeros);
    if (lowbit_prepare(&call, &handle) != LOWBIT_OK)
        exit(1);
    free(words), free(scales), free(zeros); /* a library may not have kept them */
    values[0] = array("x", LOWBIT_FLOAT32, 1, &length, x);
    run("linear.qgemv", handle, 1, values);
    y = given;
    for (i = 0; i < columns; i++)
        if (y[i] < 120 || y[i] > 120) {
            printf("column %d is %g\n", (int)i, (double)y[i]);
            exit(1);
        }
    free(y);
    lowbit_release(handle);
}

int main(void)
{
    int64_t columns;
    for (columns = 1; columns < 20; columns++) {
        pack_and_unpack(2, 32, columns);
        pack_and_unpack(3, 64, columns);
        pack_and_unpack(4, 24, columns);
        pack_and_unpack(8, 12, columns);
        multiply(columns);
    }
    puts("kept to its memory");
    return 0;
}
