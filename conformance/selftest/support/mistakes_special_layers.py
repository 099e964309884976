"""Kernels that are wrong only where a size or a number is special: heads, routing, norms, caches, offloading."""

from typing import Any

import numpy as np
from mistakes_special import wrong

Array = Any


def spread(x: Array) -> float:
    return float(np.ptp(x))


wrong(
    "attention.softmax",
    columns_1024=lambda s: s.shape[1] == 1024,
    columns_2048=lambda s: s.shape[1] == 2048,
    columns_over_1024=lambda s: s.shape[1] > 1024 and s.shape[1] % 2 == 0,
    columns_512=lambda s: s.shape[1] == 512,
    columns_384=lambda s: s.shape[1] == 384,
    rows_16_columns_64=lambda s: s.shape == (16, 64),
    rows_8_columns_128=lambda s: s.shape == (8, 128),
    rows_128=lambda s: len(s) == 128,
    greatest_first=lambda s: s.shape[1] > 4 and bool((s.argmax(1) == 0).all()) and len(s) > 1 and spread(s[0]) > 0,
    rising=lambda s: s.shape[1] > 4 and bool((np.diff(s[0]) > 0).all()),
    falling=lambda s: s.shape[1] > 4 and bool((np.diff(s[0]) < 0).all()),
    all_zero=lambda s: s.shape[1] > 1 and not s.any(),
    all_negative=lambda s: s.shape[1] > 4 and bool((s < 0).all()) and bool((s > -100).all()),
    only_last_seen=lambda s: s.shape[1] > 4 and bool(np.isinf(s[:, :-1]).all()),
    two_greatest=lambda s: s.shape[1] > 4 and bool(((s == s.max(1, keepdims=True)).sum(1) == 2).any()),
)
wrong(
    "attention.attend",
    head_128=lambda q, k, v, w=None: k.shape[2] == 128 and k.shape[0] == 8,
    head_128_length_64=lambda q, k, v, w=None: k.shape[1:] == (64, 128),
    head_64_heads_32=lambda q, k, v, w=None: q.shape[1:] == (32, 64),
    heads_32_on_8=lambda q, k, v, w=None: q.shape[1] == 32 and len(k) == 8,
    length_1024=lambda q, k, v, w=None: k.shape[1] == 1024,
    length_256_head_64=lambda q, k, v, w=None: k.shape[1:] == (256, 64),
    tokens_16_length_64=lambda q, k, v, w=None: len(q) == 16 and k.shape[1] == 64,
    tokens_64=lambda q, k, v, w=None: len(q) == k.shape[1] == 64,
    window_is_length=lambda q, k, v, w=None: w == k.shape[1] and len(q) > 1,
    window_32=lambda q, k, v, w=None: w == 32,
    window_128=lambda q, k, v, w=None: w == 128,
    equal_keys=lambda q, k, v, w=None: k.shape[1] > 2 and bool((k == k[:, :1]).all()) and bool(k.all()),
    zero_queries=lambda q, k, v, w=None: k.shape[1] > 2 and not q.any(),
    equal_values=lambda q, k, v, w=None: v.shape[1] > 2 and bool((v == v[:, :1]).all()) and bool(v.all()),
    zero_values=lambda q, k, v, w=None: not v.any(),
    tokens_16_more_than_half=lambda q, k, v, w=None: len(q) == 16 and k.shape[1] == 17,
)
wrong(
    "pooling.pool",
    head_128=lambda w, heads, groups, method="mean": w.shape[1] // heads == 128,
    head_64_members_4=lambda w, heads, groups, method="mean": w.shape[1] // heads == 64 and heads == 4 * groups,
    head_256=lambda w, heads, groups, method="mean": w.shape[1] // heads == 256,
    first_head_128=lambda w, heads, groups, method="mean": method == "first" and w.shape[1] // heads == 128,
    heads_32_groups_8=lambda w, heads, groups, method="mean": (heads, groups) == (32, 8),
    heads_64_groups_8=lambda w, heads, groups, method="mean": (heads, groups) == (64, 8),
    rows_128=lambda w, heads, groups, method="mean": len(w) == 128,
    rows_256=lambda w, heads, groups, method="mean": len(w) == 256,
    all_zero=lambda w, heads, groups, method="mean": w.size > 1 and not w.any(),
    all_negative=lambda w, heads, groups, method="mean": w.size > 8 and bool((w < 0).all()),
    huge=lambda w, heads, groups, method="mean": heads > groups and method == "mean" and bool(np.abs(w).max() > 1e37),
    dead_row=lambda w, heads, groups, method="mean": len(w) > 2 and not w[-1].any() and bool(w.any()),
)
wrong(
    "rope.rotate",
    head_128_heads_32=lambda x, r: x.shape[1:] == (32, 128),
    head_64_heads_8=lambda x, r: x.shape[1:] == (8, 64),
    head_96=lambda x, r: x.shape[2] == 96,
    tokens_16_heads_16=lambda x, r: x.shape[:2] == (16, 16),
    tokens_512=lambda x, r: len(x) == 512,
    all_zero=lambda x, r: not x.any(),
    still=lambda x, r: bool((r.cos == 1).all()),
    equal_channels=lambda x, r: x.shape[2] > 2 and bool((x == x[..., :1]).all()) and bool(x.all()),
    one_token_head_128=lambda x, r: len(x) == 1 and x.shape[2] == 128 and x.shape[1] == 8,
)
wrong(
    "blocks.rms_norm",
    columns_2048=lambda x, g, e: x.shape[1] == 2048,
    columns_5120=lambda x, g, e: x.shape[1] == 5120,
    columns_768=lambda x, g, e: x.shape[1] == 768,
    tokens_16_columns_64=lambda x, g, e: x.shape == (16, 64),
    tokens_8_columns_128=lambda x, g, e: x.shape == (8, 128),
    tokens_128=lambda x, g, e: len(x) == 128,
    zero_row=lambda x, g, e: len(x) > 1 and bool((~x.any(axis=1)).any()) and bool(x.any()),
    zero_gain=lambda x, g, e: not g.any(),
    unit_gain=lambda x, g, e: len(g) > 2 and bool((g == 1).all()),
    negative_gain=lambda x, g, e: len(g) > 2 and bool((g < 0).all()),
    equal_row=lambda x, g, e: x.shape[1] > 4 and bool((np.ptp(x, axis=1) == 0).any()) and bool(x.all()),
    tiny_epsilon=lambda x, g, e: e < 1e-10,
    large_epsilon=lambda x, g, e: e >= 0.5 and spread(x) > 0 and bool(np.abs(x).max() < 1),
)
wrong(
    "blocks.swiglu",
    columns_2048=lambda g, u: g.shape[1] == 2048,
    columns_1536=lambda g, u: g.shape[1] == 1536,
    columns_14336=lambda g, u: g.shape[1] == 14336,
    tokens_16_columns_64=lambda g, u: g.shape == (16, 64),
    tokens_64=lambda g, u: len(g) == 64,
    zero_gate=lambda g, u: g.size > 1 and not g.any(),
    zero_up=lambda g, u: u.size > 1 and not u.any() and bool(g.any()),
    gate_is_up=lambda g, u: g.size > 2 and np.array_equal(g, u) and bool(g.any()),
    all_negative_gate=lambda g, u: g.size > 4 and bool((g < 0).all()),
    gate_minus_88=lambda g, u: bool(((g < -87.5) & (g > -104)).any() and (np.abs(u) > 1).any()),
    huge_up=lambda g, u: bool(np.abs(u).max() > 1e30),
)
wrong(
    "blocks.geglu",
    columns_2048=lambda g, u: g.shape[1] == 2048,
    columns_1536=lambda g, u: g.shape[1] == 1536,
    tokens_64=lambda g, u: len(g) == 64,
    zero_gate=lambda g, u: g.size > 1 and not g.any(),
    gate_is_up=lambda g, u: g.size > 2 and np.array_equal(g, u) and bool(g.any()),
    all_negative_gate=lambda g, u: g.size > 4 and bool((g < 0).all()),
    huge_up=lambda g, u: bool(np.abs(u).max() > 1e30),
)
wrong(
    "routing.gate",
    hidden_64_experts_64=lambda x, r, *s: r.shape == (64, 64),
    hidden_128_experts_16=lambda x, r, *s: r.shape == (128, 16),
    experts_128=lambda x, r, *s: r.shape[1] == 128 and len(x) == 16,
    hidden_2048=lambda x, r, *s: len(r) == 2048,
    hidden_1024=lambda x, r, *s: len(r) == 1024,
    tokens_256=lambda x, r, *s: len(x) == 256,
    zero_token=lambda x, r, *s: len(x) > 1 and bool((~x.any(axis=1)).any()) and bool(x.any()) and x.shape[1] > 8,
    equal_experts=lambda x, r, *s: r.shape[1] > 2 and bool((r == r[:, :1]).all()) and bool(r.any()),
    dead_expert=lambda x, r, *s: r.shape[1] > 2 and len(r) > 8 and bool((~r.any(axis=0)).any()) and bool(r.any()),
)
wrong(
    "routing.top_k",
    experts_64_k_8=lambda s, k: s.shape[1] == 64 and k == 8,
    experts_128_k_8=lambda s, k: s.shape[1] == 128 and k == 8,
    experts_32_k_4=lambda s, k: s.shape[1] == 32 and k == 4,
    experts_16_k_4=lambda s, k: s.shape[1] == 16 and k == 4,
    k_16=lambda s, k: k == 16,
    k_32=lambda s, k: k == 32,
    experts_512=lambda s, k: s.shape[1] == 512,
    tokens_64_experts_8=lambda s, k: s.shape == (64, 8),
    tokens_1024=lambda s, k: len(s) == 1024,
    all_equal=lambda s, k: s.shape[1] > 8 and spread(s) == 0,
    falling=lambda s, k: s.shape[1] > 8 and bool((np.diff(s, axis=1) < 0).all()),
    all_negative=lambda s, k: s.shape[1] > 8 and bool((s < 0).all()),
    huge=lambda s, k: bool(np.abs(s).max() > 1e35),
    subnormal=lambda s, k: s.shape[1] > 4 and bool((np.abs(s) < 1e-38).all()) and spread(s) > 0,
)
wrong(
    "routing.weights",
    experts_64_k_8=lambda s, c, m="after": s.shape[1] == 64 and c.shape[1] == 8,
    k_8_tokens_16=lambda s, c, m="after": c.shape == (16, 8),
    k_16=lambda s, c, m="after": c.shape[1] == 16,
    tokens_128=lambda s, c, m="after": len(s) == 128,
    all_equal=lambda s, c, m="after": s.shape[1] > 4 and c.shape[1] > 1 and spread(s) == 0,
    all_negative=lambda s, c, m="after": s.shape[1] > 4 and c.shape[1] > 1 and bool((s < -1).all()),
)
wrong(
    "routing.expert",
    hidden_64_inner_64=lambda x, g, u, d: g.shape == (64, 64),
    hidden_128_inner_32=lambda x, g, u, d: g.shape == (128, 32),
    tokens_16_hidden_32=lambda x, g, u, d: x.shape == (16, 32),
    inner_1024=lambda x, g, u, d: g.shape[1] == 1024,
    inner_over_256=lambda x, g, u, d: g.shape[1] > 256 and g.shape[1] % 2 == 0,
    zero_token=lambda x, g, u, d: len(x) > 1 and bool((~x.any(axis=1)).any()) and bool(x.any()),
    zero_gate=lambda x, g, u, d: not g.any() and bool(u.any()),
    dead_inner=lambda x, g, u, d: g.shape[1] > 3 and bool((~g.any(axis=0)).any()) and bool(g.any()),
)
wrong(
    "routing.sparse",
    experts_16_k_4=lambda x, g, u, d, c, w: len(g) == 16 and c.shape[1] == 4,
    experts_64_k_8=lambda x, g, u, d, c, w: len(g) == 64 and c.shape[1] == 8,
    tokens_16_k_2=lambda x, g, u, d, c, w: c.shape == (16, 2),
    tokens_32_experts_8=lambda x, g, u, d, c, w: len(x) == 32 and len(g) == 8,
    tokens_over_64=lambda x, g, u, d, c, w: len(x) > 70,
    hidden_64_inner_32=lambda x, g, u, d, c, w: g.shape[1:] == (64, 32),
    all_one_expert=lambda x, g, u, d, c, w: len(c) > 2 and len(g) > 2 and c.shape[1] == 1 and spread(c) == 0,
    zero_weight=lambda x, g, u, d, c, w: bool((w == 0).any()),
    equal_weights=lambda x, g, u, d, c, w: w.shape[1] > 1 and spread(w) == 0,
    expert_unused=lambda x, g, u, d, c, w: len(g) > 2 and len(c) > 4 and len(np.unique(c)) <= len(g) // 2,
)
wrong(
    "ksort.permutation",
    size_128=lambda s, *o: len(s) == 128,
    size_256=lambda s, *o: len(s) == 256,
    all_equal=lambda s, *o: len(s) > 2 and spread(s) == 0,
    falling=lambda s, *o: len(s) > 4 and bool((np.diff(s) < 0).all()),
    rising=lambda s, *o: len(s) > 4 and bool((np.diff(s) > 0).all()),
    all_zero=lambda s, *o: len(s) > 2 and not s.any(),
    size_512=lambda s, *o: len(s) == 512,
)
wrong(
    "blocking.apply blocking.invert",
    rows_64_columns_64=lambda a, own: (own.rows, own.columns) == (64, 64),
    rows_16_columns_128=lambda a, own: (own.rows, own.columns) == (16, 128),
    block_8_by_16=lambda a, own: own.block == (8, 16),
    panel_32_of_96=lambda a, own: own.order == "column_panels" and own.block[1] == 32 and own.columns == 96,
    panel_16_rows_64=lambda a, own: own.order == "column_panels" and own.block[1] == 16 and own.rows == 64,
    rows_128=lambda a, own: own.rows == 128,
    rows_256=lambda a, own: own.rows == 256,
)


# **Caches.** The arguments that opened one, then the keys and values of all steps.

wrong(
    "kvcache.bfp",
    steps_of_16=lambda h, d, k, v, steps: len(steps[-1][0]) == 16,
    steps_of_8=lambda h, d, k, v, steps: len(steps[-1][0]) == 8 and h > 1,
    steps_of_32=lambda h, d, k, v, steps: len(steps[-1][0]) == 32,
    steps_of_64=lambda h, d, k, v, steps: len(steps[-1][0]) == 64,
    steps_over_16=lambda h, d, k, v, steps: 16 < len(steps[-1][0]) < 1000,
    steps_of_128=lambda h, d, k, v, steps: len(steps[-1][0]) == 128,
    step_of_16_after_others=lambda h, d, k, v, steps: len(steps) > 1 and len(steps[-1][0]) == 16,
    holds_32=lambda h, d, k, v, steps: sum(len(step[0]) for step in steps) == 32,
    holds_64=lambda h, d, k, v, steps: sum(len(step[0]) for step in steps) == 64,
    holds_256=lambda h, d, k, v, steps: sum(len(step[0]) for step in steps) == 256,
    holds_1024=lambda h, d, k, v, steps: sum(len(step[0]) for step in steps) == 1024,
    heads_8=lambda h, d, k, v, steps: h == 8,
    heads_32=lambda h, d, k, v, steps: h == 32,
    head_64_heads_8=lambda h, d, k, v, steps: (h, d) == (8, 64),
    head_128_heads_8=lambda h, d, k, v, steps: (h, d) == (8, 128),
    head_96=lambda h, d, k, v, steps: d == 96,
    keys_16_8=lambda h, d, k, v, steps: (k.block, k.mantissa) == (16, 8),
    same_formats=lambda h, d, k, v, steps: k == v and k.mantissa == 8,
    values_64_4=lambda h, d, k, v, steps: (v.block, v.mantissa) == (64, 4),
    mantissa_9=lambda h, d, k, v, steps: k.mantissa == 9,
    mantissa_16=lambda h, d, k, v, steps: v.mantissa == 16,
    zeros=lambda h, d, k, v, steps: not steps[-1][0].any() and not steps[-1][1].any() and len(steps[-1][0]) > 1,
    same_token_again=lambda h, d, k, v, steps: len(steps) > 1 and np.array_equal(steps[-1][0], steps[-2][0]),
    keys_are_values=lambda h, d, k, v, steps: np.array_equal(steps[-1][0], steps[-1][1]) and bool(steps[-1][0].any()),
)


# **Offloading.** A trace has all requests at once, an engine one after another.


def of_both(**kernels: Any) -> None:
    wrong("offload.trace", **{name: lambda a, r, when=when: when(a, r) for name, when in kernels.items()})
    wrong(
        "offload.engine",
        **{name: lambda a, steps, when=when: when(a, [s[0] for s in steps]) for name, when in kernels.items()},
    )


def staged(requests: Any) -> int:
    return max(len(set(each.guesses)) for each in requests)


of_both(
    buffers_over_32=lambda a, r: a.buffers > 32 and staged(r) > 32,
    buffers_over_64=lambda a, r: a.buffers > 64 and staged(r) > 64,
    buffers_over_8=lambda a, r: a.buffers > 8 and staged(r) > 8,
    buffers_over_16=lambda a, r: a.buffers > 16 and staged(r) > 16,
    buffers_32=lambda a, r: a.buffers == 32,
    buffers_16=lambda a, r: a.buffers == 16,
    layers_over_16=lambda a, r: max(each.layer for each in r) >= 16,
    layers_over_32=lambda a, r: max(each.layer for each in r) >= 32,
    layers_over_64=lambda a, r: max(each.layer for each in r) >= 64,
    layers_over_128=lambda a, r: max(each.layer for each in r) >= 128,
    layers_over_256=lambda a, r: max(each.layer for each in r) >= 256,
    layer_16_twice=lambda a, r: sum(each.layer == 16 for each in r) > 1,
    slots_over_32=lambda a, r: a.slots > 32 and max(len(each.needed) for each in r) > 1,
    slots_64=lambda a, r: a.slots == 64,
    slots_16=lambda a, r: a.slots == 16 and a.memory == "swap",
    experts_64=lambda a, r: a.experts == 64,
    experts_over_128=lambda a, r: a.experts > 128 and a.memory == "swap",
    experts_over_1024=lambda a, r: a.experts > 1024,
    slots_are_buffers_are_experts=lambda a, r: a.experts == a.slots == a.buffers > 4,
    needed_over_16=lambda a, r: max(len(each.needed) for each in r) > 16,
    needed_over_64=lambda a, r: max(len(each.needed) for each in r) > 64,
    same_request_again=lambda a, r: len(r) > 2 and a.layers == 1 and r[-1] == r[-2] == r[-3] and bool(r[-1].needed),
    empty_pass=lambda a, r: len(r) > 1 and a.layers > 1 and not r[-1].needed and not r[-2].needed,
    only_guesses=lambda a, r: bool(r[-1].guesses) and not r[-1].needed,
)
