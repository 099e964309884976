"""Attention: rotary embeddings, the key-value cache in Block Floating Point, K-sort, and grouped queries."""
