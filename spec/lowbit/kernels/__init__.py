"""Kernels: memory layouts, a vocabulary of vector instructions, and programs that a generator writes in it.

`layouts` says in what order words lie in memory. `vector`, `vector_integer` and `vector_elementwise` are the
vocabulary. A `program` is written in it, and the `interpreter` runs it. `microkernel`, `blocking` and `generator` are
the paper's algorithms, from the innermost loop to a whole product.
"""
