"""Attention: rotary embeddings, the key-value cache in Block Floating Point, K-sort, and grouped queries.

Read `rope` and `attention` first. `kvcache` stores keys and values in few bits, `ksort` makes that more exact,
`pooling` turns a multi-head checkpoint into a grouped-query one, and `bounds` limits the error.
"""
