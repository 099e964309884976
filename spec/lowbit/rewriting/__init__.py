"""Rewriting models: quantise one, convert it without a loss, pool its key-value heads, or sort its key channels.

`lowbit.rewriting.source` opens the original, `lowbit.rewriting.methods` turns weights into codes,
`lowbit.rewriting.layouts` and `lowbit.rewriting.packers` turn codes into the tensors of a published format,
`lowbit.rewriting.journal` keeps finished parts until all are there, and `lowbit.rewriting.writing` loads the result and
compares it with the intended numbers. `lowbit.rewriting.quantizing` and `lowbit.rewriting.converting` put these
together. `lowbit.rewriting.changing` writes a model whose attention is changed, and `lowbit.rewriting.pooling` and
`lowbit.rewriting.sorting` are such changes.
"""
