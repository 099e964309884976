"""Attention: rotary embeddings, the key-value cache in Block Floating Point, K-sort, and grouped queries.

Read `rope` and `attention` first. `shaped` adds a factor, a soft cap and sinks to the scores. `kvcache` stores keys and
values in Block Floating Point, `ksort` makes this more exact, `kivi_cache` stores them as KIVI does, and `stored` reads
them in any format. `pooling` turns a multi-head checkpoint into a grouped-query one, and `bounds` limits the error.
"""
