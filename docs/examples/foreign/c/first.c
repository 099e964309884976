/* The smallest backend: 8-bit codes out of their words.
 *
 *     cc -std=c99 -O2 -shared -fPIC -I"$(python -m lowbit_foreign)" first.c -o libfirst.so
 *     lowbit conformance --library ./libfirst.so
 */
#include "lowbit.h"

uint32_t lowbit_abi_version(void) { return LOWBIT_ABI; }

const char *lowbit_capabilities(void)
{
    return "{\"name\": \"mine\", \"operations\": {\"packing.unpack\": {\"limits\": {\"bits\": [8]}}}}";
}

int32_t lowbit_run(lowbit_call *call)
{
    const uint32_t *words = lowbit_data(call, "words", LOWBIT_UINT32);
    int64_t rows = 4 * lowbit_size(call, "words", 0), columns = lowbit_size(call, "words", 1), k, n;
    int64_t shape[2] = {rows, columns};
    uint8_t *codes = call->result(call, "result", LOWBIT_ARRAY, LOWBIT_UINT8, 2, shape);
    if (!codes)
        return LOWBIT_FAILED;
    for (k = 0; k < rows; k++)
        for (n = 0; n < columns; n++)
            codes[k * columns + n] = (uint8_t)(words[k / 4 * columns + n] >> k % 4 * 8);
    return LOWBIT_OK;
}
