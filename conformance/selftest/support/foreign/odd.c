/* A library for tests of the adapter. bfp.store and offload.trace give back what they were given, part by part;
   formats.quantize gives a matrix of ones; packing.pack misbehaves in a way that the number of columns chooses;
   offload.engine counts its steps. */
#include <stdio.h>
#include <stdlib.h>

#include "lowbit.h"

#ifndef CAPABILITIES
#define CAPABILITIES \
    "{\"name\": \"odd\", \"version\": \"2\", \"alignment\": 64, \"overread\": 32, \"details\": {\"made of\": \"C\"}, " \
    "\"operations\": {\"packing.pack\": {}, \"formats.quantize\": {}, \"bfp.store\": {}, \"offload.trace\": {}, " \
    "\"offload.engine\": {}, " \
    "\"linear.qgemm\": {\"arithmetic\": {\"form\": \"factored\", \"accumulator\": \"float32\", " \
    "\"roundings\": {\"rows\": 0.5, \"groups\": 1, \"constant\": 2}}}}}"
#endif
#ifndef VERSION
#define VERSION LOWBIT_ABI
#endif

uint32_t lowbit_abi_version(void)
{
    return VERSION;
}

const char *lowbit_capabilities(void)
{
    return CAPABILITIES;
}

/* Copies every argument below `root` to the result. */
static int32_t echo(lowbit_call *call, const char *root)
{
    const char *at = (const char *)call->arguments;
    int64_t i;
    for (i = 0; i < call->count; i++) {
        const lowbit_value *value = (const lowbit_value *)(const void *)at;
        size_t length = strlen(root);
        at += value->size;
        if (!strncmp(value->path, root, length) && (value->path[length] == '.' || value->path[length] == 0)) {
            int32_t sized = value->kind == LOWBIT_TEXT || value->kind == LOWBIT_RECORD || value->kind == LOWBIT_LIST;
            const int64_t *shape = value->kind == LOWBIT_ARRAY ? value->shape : &value->integer;
            char path[100];
            void *room;
            int32_t d;
            size_t size;
            snprintf(path, sizeof path, "result%s", value->path + length);
            room = call->result(call, path, value->kind, value->dtype, sized ? 1 : value->ndim, shape);
            if (!room)
                return LOWBIT_FAILED;
            switch (value->kind) {
            case LOWBIT_ARRAY:
                size = (size_t)value->strides[value->ndim - 1];
                for (d = 0; d < value->ndim; d++)
                    size *= (size_t)value->shape[d];
                memcpy(room, value->data, size);
                if ((uintptr_t)value->data % 64)
                    return lowbit_say(call, LOWBIT_FAILED, "an array that is not aligned");
                break;
            case LOWBIT_TEXT:
            case LOWBIT_RECORD:
                memcpy(room, value->text, (size_t)value->integer);
                break;
            case LOWBIT_REAL:
                *(double *)room = value->real;
                break;
            case LOWBIT_BOOL:
            case LOWBIT_INTEGER:
                *(int64_t *)room = value->integer;
                break;
            default:
                break;
            }
        }
    }
    return LOWBIT_OK;
}

static int32_t misbehave(lowbit_call *call)
{
    int64_t shape[2], huge = INT64_MAX / 8, below = -1;
    char *room, text[3000];
    shape[0] = lowbit_size(call, "codes", 0) * lowbit_integer(call, "bits", 0) / 32;
    shape[1] = lowbit_size(call, "codes", 1);
    switch (shape[1]) {
    case 1: /* well */
        room = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 2, shape);
        memset(room, 7, 4 * (size_t)shape[0]);
        return LOWBIT_OK;
    case 2:
        return LOWBIT_OK;
    case 3:
        return 77;
    case 4:
        memset(text, 'x', sizeof text);
        text[sizeof text - 1] = 0;
        return lowbit_say(call, LOWBIT_FAILED, text);
    case 5:
        return lowbit_say(call, LOWBIT_BAD_ARGUMENT, "codes of another colour");
    case 6:
        return lowbit_say(call, LOWBIT_NOT_DECLARED, "six columns");
    case 7:
        call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 2, shape);
        call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 2, shape);
        return LOWBIT_OK;
    case 8:
        return call->result(call, "result", LOWBIT_ARRAY, 99, 2, shape) ? LOWBIT_OK : LOWBIT_OK;
    case 9:
        return call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 1, &below) ? LOWBIT_OK : LOWBIT_OK;
    case 10:
        return call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 1, &huge) ? LOWBIT_OK : LOWBIT_OK;
    case 11:
        room = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 2, shape);
        room[4 * shape[0] * shape[1]] = 0;
        return LOWBIT_OK;
    case 12:
        room = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 2, shape);
        room[-3] = 0;
        return LOWBIT_OK;
    case 13:
        return call->result(call, NULL, LOWBIT_ARRAY, LOWBIT_UINT32, 2, shape) ? LOWBIT_OK : LOWBIT_OK;
    case 14:
        return call->result(call, "result", 42, 0, 0, NULL) ? LOWBIT_OK : LOWBIT_OK;
    case 15:
        return call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT32, 2, NULL) ? LOWBIT_OK : LOWBIT_OK;
    case 16: /* a record of a type that does not exist */
        huge = 4;
        memcpy(call->result(call, "result", LOWBIT_RECORD, 0, 1, &huge), "os.x", 4);
        return LOWBIT_OK;
    default: /* text that is no UTF-8 */
        huge = 1;
        *(char *)call->result(call, "result", LOWBIT_TEXT, 0, 1, &huge) = (char)0xFF;
        return LOWBIT_OK;
    }
}

/* A stored matrix whose bytes are all 1. */
static int32_t quantize(lowbit_call *call)
{
    int64_t rows = lowbit_size(call, "x", 1), columns = lowbit_size(call, "x", 0), shape[2];
    void *room;
    shape[0] = columns, shape[1] = rows / 32 * 18;
    if (!lowbit_begin_stored(call, lowbit_text(call, "format"), rows, columns))
        return LOWBIT_FAILED;
    room = call->result(call, "result.blocks", LOWBIT_ARRAY, LOWBIT_UINT8, 2, shape);
    memset(room, 1, (size_t)(shape[0] * shape[1]));
    return LOWBIT_OK;
}

/* The product of a prepared matrix: its handle's number in every element. */
static int32_t qgemm(lowbit_call *call)
{
    int64_t shape[2], i;
    float *room;
    shape[0] = lowbit_size(call, "x", 0);
    shape[1] = *(int64_t *)call->handle;
    room = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_FLOAT32, 2, shape);
    for (i = 0; room && i < shape[0] * shape[1]; i++)
        room[i] = (float)shape[1];
    return LOWBIT_OK;
}

int32_t lowbit_run(lowbit_call *call)
{
    if (!strcmp(call->operation, "bfp.store"))
        return echo(call, "blocks");
    if (!strcmp(call->operation, "offload.trace"))
        return echo(call, "requests");
    if (!strcmp(call->operation, "formats.quantize"))
        return quantize(call);
    return strcmp(call->operation, "linear.qgemm") ? misbehave(call) : qgemm(call);
}

static int64_t alive = 0; /* handles that were made and not given back */

static void *made(int64_t number)
{
    int64_t *handle = malloc(sizeof *handle);
    *handle = number;
    alive++;
    return handle;
}

static void ended(void *handle)
{
    free(handle);
    alive--;
}

int32_t lowbit_prepare(lowbit_call *call, void **handle)
{
    int64_t columns = lowbit_size(call, "matrix.words", 1);
    int64_t *nbytes = call->result(call, "nbytes", LOWBIT_INTEGER, 0, 0, NULL);
    *nbytes = 1000 + alive;
    if (columns == 13)
        return LOWBIT_OK; /* and no handle */
    *handle = made(columns);
    return LOWBIT_OK;
}

void lowbit_release(void *handle)
{
    ended(handle);
}

int32_t lowbit_open(lowbit_call *call, void **handle)
{
    *handle = made(lowbit_integer(call, "arrangement.layers", -1));
    return LOWBIT_OK;
}

int32_t lowbit_step(lowbit_call *call)
{
    int64_t *count = call->handle;
    *(int64_t *)call->result(call, "result", LOWBIT_INTEGER, 0, 0, NULL) =
        ++*count * 100 + lowbit_integer(call, "request.layer", 99);
    return LOWBIT_OK;
}

void lowbit_close(void *handle)
{
    ended(handle);
}
