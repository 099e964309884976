"""Adapters: kernels of other projects as ordinary backends, under the same suite.

Each module passes weights to a kernel of one library, in that library's layout, and declares what its documentation or
source says: the widths, groups and conventions that it supports, and the form in which it sums. An adapter only
converts layouts. It never corrects a result: a failure is a property of a version of that library, and the docs have a
page of such failures.

===================== ==================================== =================================================
backend               what runs                            operations
===================== ==================================== =================================================
`onnxruntime`         MatMulNBits, integer zero-points     `linear.qgemv`, `linear.qgemm`: ``zero_point``
`onnxruntime-minimum` MatMulNBits, float zero-points       `linear.qgemv`, `linear.qgemm`: ``minimum``
`torch`               the int4 product of its CPU build    `linear.qgemv`, `linear.qgemm`
`ggml`                Q4_0, Q4_1 and Q8_0 of ggml          `affine.dequantize`, and `affine.quantize` by Q4_1
`gguf`                the same, in numpy                   `affine.dequantize`, and `affine.quantize` by Q4_1
===================== ==================================== =================================================

No library is imported before it is used; a missing library makes its backend unavailable, with the reason. The extra
``adapters`` installs all of them.
"""
