/*
 * lowbit.h: what a shared library implements to be tested against the lowbit specification.
 *
 *     lowbit conformance --library ./libmine.so
 *
 * A library exports three functions, lowbit_abi_version, lowbit_capabilities and lowbit_run; the others are for those
 * who need them. The specification says what each operation computes, by name (its page `operations`); this file says
 * how arguments and results cross the border. It is C99 and C++, and needs nothing but the standard headers below.
 *
 * Four rules:
 *
 * 1. Arguments are a flat list of named values. What has parts comes apart: a quantised matrix is a record `matrix`
 *    and the values `matrix.words`, `matrix.scales`, `matrix.bits` and so on. All of them have been checked against
 *    the specification before the library is called, and options that the caller left out have their defaults.
 * 2. Results are written into memory that the caller hands out, when the library asks for it by `call->result`.
 * 3. Nothing that a call points to may be used after the call has returned. Arguments are read-only.
 * 4. Whoever allocates memory frees it. The library never frees what the caller passes, and the caller returns a handle
 *    by lowbit_release or lowbit_close, once.
 *
 * A matrix stored in a format of the field (GPTQ, Q4_0, MXFP4 ...) is a record too. Its tensors and options have the
 * names of the format's table, on the specification's page of formats:
 *
 *     path              kind             content
 *     weights           LOWBIT_RECORD    "formats.Stored"
 *     weights.format    LOWBIT_TEXT      "gptq-v2"
 *     weights.rows      LOWBIT_INTEGER   K, the length of the sums of y = x W
 *     weights.columns   LOWBIT_INTEGER   N
 *     weights.qweight   LOWBIT_ARRAY     a tensor of the table; likewise weights.qzeros, weights.scales, weights.g_idx
 *     weights.bits      LOWBIT_INTEGER   an option of the table; likewise weights.group_size
 *
 * A block format, such as those of GGUF, has one tensor, weights.blocks: N rows of bytes. Activations that are stored,
 * as in linear.gemm_cast, come likewise: x.blocks, with x.columns vectors. The same parts also come by number, as
 * lists: weights.tensors.0 ..., and weights.options.0.0 (a name) and weights.options.0.1 (its value). A result of this
 * type is written by names or by numbers, see lowbit_begin_stored.
 *
 * Structures begin with their size as the caller was compiled, so that later versions can append to them.
 *
 * License: Apache-2.0.
 */
#ifndef LOWBIT_H
#define LOWBIT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this file. A caller accepts exactly its own. */
#define LOWBIT_ABI 1

#if defined(_WIN32)
#define LOWBIT_EXPORT __declspec(dllexport)
#elif defined(__GNUC__)
#define LOWBIT_EXPORT __attribute__((visibility("default")))
#else
#define LOWBIT_EXPORT
#endif

/* What lowbit_run and its like return. */
enum {
    LOWBIT_OK = 0,
    LOWBIT_NOT_DECLARED = 1, /* not offered, or not for these arguments */
    LOWBIT_BAD_ARGUMENT = 2, /* an argument that the specification does not allow */
    LOWBIT_FAILED = 3        /* anything else; say what by lowbit_say */
};

/* What a value is. */
enum {
    LOWBIT_NONE = 0,    /* nothing, where the specification says None */
    LOWBIT_BOOL = 1,    /* `integer`, 0 or 1 */
    LOWBIT_INTEGER = 2, /* `integer` */
    LOWBIT_REAL = 3,    /* `real` */
    LOWBIT_TEXT = 4,    /* `text`, `integer` bytes of UTF-8 and a NUL after them */
    LOWBIT_ARRAY = 5,   /* `data`, `dtype`, `ndim`, `shape`, `strides` */
    LOWBIT_LIST = 6,    /* `integer` items follow, as PATH.0, PATH.1 ... */
    LOWBIT_RECORD = 7   /* fields follow, as PATH.NAME ...; `text` is its type, such as "affine.QuantizedMatrix" */
};

/* Types of the elements of arrays, in the machine's own byte order. */
enum {
    LOWBIT_NO_DTYPE = 0,
    LOWBIT_BOOL8 = 1, /* one byte, 0 or 1 */
    LOWBIT_INT8 = 2,
    LOWBIT_INT16 = 3,
    LOWBIT_INT32 = 4,
    LOWBIT_INT64 = 5,
    LOWBIT_UINT8 = 6,
    LOWBIT_UINT16 = 7,
    LOWBIT_UINT32 = 8,
    LOWBIT_UINT64 = 9,
    LOWBIT_FLOAT16 = 10,
    LOWBIT_FLOAT32 = 11,
    LOWBIT_FLOAT64 = 12,
    /* Their elements are bit patterns, of two bytes (bfloat16) or one, as the chapter `floats` defines them. */
    LOWBIT_BFLOAT16 = 13,
    LOWBIT_FLOAT8_E5M2 = 14,
    LOWBIT_FLOAT8_E4M3FN = 15,
    LOWBIT_FLOAT6_E3M2FN = 16, /* in the low 6 bits of a byte */
    LOWBIT_FLOAT6_E2M3FN = 17,
    LOWBIT_FLOAT4_E2M1FN = 18, /* in the low 4 bits of a byte */
    LOWBIT_FLOAT8_E8M0FNU = 19
};

typedef struct lowbit_value {
    uint32_t size;          /* sizeof(lowbit_value) of the caller */
    int32_t kind;           /* LOWBIT_NONE ... LOWBIT_RECORD */
    const char *path;       /* "codes", "matrix.words", "requests.0.layer" */
    int32_t dtype;          /* of an array, or of a number that has a type of its own; otherwise LOWBIT_NO_DTYPE */
    int32_t ndim;           /* dimensions of an array, 0 to 8 */
    const int64_t *shape;   /* ndim sizes */
    const int64_t *strides; /* ndim distances in bytes; of C order, unless the operation's page welcomes others */
    const void *data;       /* first element */
    int64_t integer;
    double real;
    const char *text;
} lowbit_value;

typedef struct lowbit_call lowbit_call;

/*
 * Asks for the memory of one part of the result, and returns where to write it; NULL if the caller cannot have it, in
 * which case the call fails whatever the library then returns. Each path is asked for once.
 *
 *     kind            shape               write
 *     LOWBIT_ARRAY    ndim sizes          the elements, of `dtype`, in C order
 *     LOWBIT_TEXT     1 size, in bytes    UTF-8, without a NUL
 *     LOWBIT_RECORD   1 size, in bytes    the name of its type, and then ask for each field, as PATH.NAME
 *     LOWBIT_LIST     1 size, in items    nothing, and then ask for each item, as PATH.0, PATH.1 ...
 *     LOWBIT_BOOL     none (ndim 0)       an int64_t, 0 or 1
 *     LOWBIT_INTEGER  none                an int64_t
 *     LOWBIT_REAL     none                a double
 *     LOWBIT_NONE     none                nothing
 *
 * What comes back for LOWBIT_LIST and LOWBIT_NONE points to no memory that may be written to. The path of the whole
 * result is "result".
 */
typedef void *(*lowbit_result_function)(
    lowbit_call *call, const char *path, int32_t kind, int32_t dtype, int32_t ndim, const int64_t *shape);

struct lowbit_call {
    uint32_t size;                 /* sizeof(lowbit_call) of the caller */
    uint32_t abi;                  /* LOWBIT_ABI of the caller */
    const char *operation;         /* "packing.pack" */
    void *handle;                  /* what lowbit_prepare or lowbit_open made, or NULL */
    int64_t count;                 /* number of arguments, parts counted one by one */
    const lowbit_value *arguments; /* lowbit_argument finds one by its path */
    lowbit_result_function result;
    void *owner;                   /* the caller's own; leave it alone */
    char *message;                 /* where to say what is wrong, NUL-terminated; see lowbit_say */
    size_t message_size;
};

/* ---- What every library exports. ---- */

/* LOWBIT_ABI. */
LOWBIT_EXPORT uint32_t lowbit_abi_version(void);

/*
 * What the library does, as JSON text that stays where it is and never changes:
 *
 *     {"name": "mine", "version": "1.0",
 *      "concurrent": false, "alignment": 0, "overread": 0, "profiles": [],
 *      "details": {"compiler": "gcc 12"},
 *      "operations": {
 *        "packing.pack": {"limits": {"bits": [2, 4]}},
 *        "linear.qgemv": {"limits": {"bits": [4], "convention": ["minimum"]},
 *                         "arithmetic": {"form": "dequantised", "accumulator": "float32",
 *                                        "roundings": "any_order"}}}}
 *
 * Only "name" and "operations" must be there. "limits" names each parameter of the operation that is not handled in
 * full, with the values that are, or for a size with a range of which each key may be left out:
 *
 *     "linear.gemv": {"limits": {"format": ["gptq-v2"], "bits": [4], "activations": ["float16"], "result": ["float16"],
 *                                "columns": {"multiple": 8, "least": 8, "most": 65536}},
 *                     "arithmetic": {"form": "dequantised", "accumulator": "float32", "roundings": "any_order",
 *                                    "weights": "float16"}}
 *
 * "arithmetic" is for bounded operations: the form of the computation, the accumulator and the most roundings that a
 * term of the sum meets, "any_order" (rows + 1), "one_loop" (equation 2 as a plain loop), or {"rows": a, "groups": b,
 * "constant": c} for a·rows + b·groups + c, rounded up. Products of stored matrices may add "weights", the type into
 * which weights are turned before they are multiplied ("float32" if it is left out; "exact" if nothing is rounded on
 * the way to a weight, or none is formed), and for the accumulator "float16" the "promotion", the number of products
 * after which the sum is added to one in float32 (0: never). Operations with a limit "inputs", the types of their arrays
 * (float32 only if it is left out), may add "intermediate": "inputs" if values are rounded to that type between steps.
 *
 * "concurrent" says that several threads may call at once, "alignment" to how many bytes arrays must be aligned (0: to
 * their elements), and "overread" how many bytes past the end of an array may be read (never used).
 */
LOWBIT_EXPORT const char *lowbit_capabilities(void);

/* Runs `call->operation` and writes its result. */
LOWBIT_EXPORT int32_t lowbit_run(lowbit_call *call);

/* ---- For weights that are laid out anew before they are used. ---- */

/*
 * Makes the argument `matrix` ready. lowbit_run is then called for linear.qgemv, linear.qgemm and linear.qgemm_bfp with
 * this handle and with `x` alone. A library that exports no lowbit_prepare gets `x` and `matrix` in each call. It may
 * ask for the result "nbytes", an integer: the bytes of weights that one product reads. Stored matrices are not
 * prepared: linear.gemv, linear.gemm and linear.gemm_cast get `x` and `weights` in each call.
 */
LOWBIT_EXPORT int32_t lowbit_prepare(lowbit_call *call, void **handle);
LOWBIT_EXPORT void lowbit_release(void *handle);

/* ---- For operations that keep a state from step to step. All three or none. ---- */

/* Begins; `call->operation` says what, and its arguments are those of the beginning. */
LOWBIT_EXPORT int32_t lowbit_open(lowbit_call *call, void **handle);
/* One step on `call->handle`; its result is the step's. */
LOWBIT_EXPORT int32_t lowbit_step(lowbit_call *call);
LOWBIT_EXPORT void lowbit_close(void *handle);

/* ---- Help for implementers, inline. ---- */

/* The argument of this path, or NULL. */
static inline const lowbit_value *lowbit_argument(const lowbit_call *call, const char *path)
{
    const char *at = (const char *)call->arguments;
    int64_t i;
    for (i = 0; i < call->count; i++) {
        const lowbit_value *value = (const lowbit_value *)(const void *)at;
        if (strcmp(value->path, path) == 0)
            return value;
        at += value->size; /* the caller's size, which may be larger than ours */
    }
    return NULL;
}

/* The elements of an array argument, or NULL if there is none of this path and type. */
static inline const void *lowbit_data(const lowbit_call *call, const char *path, int32_t dtype)
{
    const lowbit_value *value = lowbit_argument(call, path);
    return value && value->kind == LOWBIT_ARRAY && value->dtype == dtype ? value->data : NULL;
}

/* One size of an array argument, or -1. */
static inline int64_t lowbit_size(const lowbit_call *call, const char *path, int32_t dimension)
{
    const lowbit_value *value = lowbit_argument(call, path);
    return value && value->kind == LOWBIT_ARRAY && dimension < value->ndim ? value->shape[dimension] : -1;
}

/* An integer argument, or `otherwise` if there is none. */
static inline int64_t lowbit_integer(const lowbit_call *call, const char *path, int64_t otherwise)
{
    const lowbit_value *value = lowbit_argument(call, path);
    return value && value->kind == LOWBIT_INTEGER ? value->integer : otherwise;
}

/* A text argument, or "". */
static inline const char *lowbit_text(const lowbit_call *call, const char *path)
{
    const lowbit_value *value = lowbit_argument(call, path);
    return value && value->kind == LOWBIT_TEXT ? value->text : "";
}

/* Writes a part of the result that is a text or the type of a record; 0 if the caller cannot have it. */
static inline int lowbit_put_text(lowbit_call *call, const char *path, int32_t kind, const char *text)
{
    int64_t length = (int64_t)strlen(text);
    void *room = call->result(call, path, kind, LOWBIT_NO_DTYPE, 1, &length);
    if (room)
        memcpy(room, text, (size_t)length);
    return room != NULL;
}

/* Writes a part of the result that is an integer; 0 if the caller cannot have it. */
static inline int lowbit_put_integer(lowbit_call *call, const char *path, int64_t number)
{
    int64_t *room = (int64_t *)call->result(call, path, LOWBIT_INTEGER, LOWBIT_NO_DTYPE, 0, NULL);
    if (room)
        *room = number;
    return room != NULL;
}

/* Begins a result that is a stored matrix, K x N; 0 if the caller cannot have it. Afterwards ask for its tensors and
   options by name: "result.blocks", or "result.qweight", "result.bits" and so on. */
static inline int lowbit_begin_stored(lowbit_call *call, const char *format, int64_t rows, int64_t columns)
{
    return lowbit_put_text(call, "result", LOWBIT_RECORD, "formats.Stored") &&
           lowbit_put_text(call, "result.format", LOWBIT_TEXT, format) &&
           lowbit_put_integer(call, "result.rows", rows) && lowbit_put_integer(call, "result.columns", columns);
}

/* Says what is wrong, cut to the caller's buffer, and returns the status, so that one line does both. */
static inline int32_t lowbit_say(lowbit_call *call, int32_t status, const char *message)
{
    if (call->message && call->message_size) {
        size_t length = strlen(message);
        if (length >= call->message_size)
            length = call->message_size - 1;
        memcpy(call->message, message, length);
        call->message[length] = 0;
    }
    return status;
}

#ifdef __cplusplus
}
#endif

#endif
