"""Adapters: kernels that others have written, as ordinary backends under the same suite.

Each module hands one library's own kernel the weights in that library's layout, and declares of it what its
documentation or source says: the widths, groups and conventions that it can express, and the form in which it sums.
An adapter converts layouts and nothing else. It never corrects a result: what fails is a fact about a version of that
library, and the docs have a page of such facts.

===================== ==================================== =================================================
backend               what runs                            operations
===================== ==================================== =================================================
`onnxruntime`         MatMulNBits, integer zero-points     `linear.qgemv`, `linear.qgemm`: ``zero_point``
`onnxruntime-minimum` MatMulNBits, float zero-points       `linear.qgemv`, `linear.qgemm`: ``minimum``
`torch`               the int4 product of its CPU build    `linear.qgemv`, `linear.qgemm`
`ggml`                Q4_0, Q4_1 and Q8_0 of ggml          `affine.dequantize`, and `affine.quantize` by Q4_1
`gguf`                the same, in numpy                   `affine.dequantize`, and `affine.quantize` by Q4_1
===================== ==================================== =================================================

No library is imported before it is used; a library that is missing makes its backend unavailable, in words. All of
them come with the extra ``adapters``.
"""
