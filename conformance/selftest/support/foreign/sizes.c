/* Prints how the compiler lays out the structures of lowbit.h, one field a line: name, offset, size. */
#include <stdio.h>

#include "lowbit.h"

#define FIELD(type, field) printf(#type "." #field " %zu %zu\n", offsetof(type, field), sizeof(((type *)0)->field))

int main(void)
{
    FIELD(lowbit_value, size);
    FIELD(lowbit_value, kind);
    FIELD(lowbit_value, path);
    FIELD(lowbit_value, dtype);
    FIELD(lowbit_value, ndim);
    FIELD(lowbit_value, shape);
    FIELD(lowbit_value, strides);
    FIELD(lowbit_value, data);
    FIELD(lowbit_value, integer);
    FIELD(lowbit_value, real);
    FIELD(lowbit_value, text);
    FIELD(lowbit_call, size);
    FIELD(lowbit_call, abi);
    FIELD(lowbit_call, operation);
    FIELD(lowbit_call, handle);
    FIELD(lowbit_call, count);
    FIELD(lowbit_call, arguments);
    FIELD(lowbit_call, result);
    FIELD(lowbit_call, owner);
    FIELD(lowbit_call, message);
    FIELD(lowbit_call, message_size);
    printf("lowbit_value 0 %zu\nlowbit_call 0 %zu\n", sizeof(lowbit_value), sizeof(lowbit_call));
    return 0;
}
