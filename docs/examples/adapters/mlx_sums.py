"""MLX on a CPU: 65536 ones times a matrix of ones in 4 bits, and a scale of 2^20 with activations in float16."""

import mlx.core as mx

K = 65536
codes = mx.full((32, K // 8), 0x11111111, dtype=mx.uint32)  # affine: scale 1, bias 0
ones = mx.full((32, K // 8), 0x22222222, dtype=mx.uint32)  # 1 in MXFP4
exponents = mx.full((32, K // 32), 127, dtype=mx.uint8)
for kind in (mx.float32, mx.bfloat16):
    x = mx.ones((1, K), dtype=kind)
    scales, biases = mx.ones((32, K // 64), dtype=kind), mx.zeros((32, K // 64), dtype=kind)
    affine = mx.quantized_matmul(x, codes, scales, biases, group_size=64, bits=4)[0, 0].item()
    mxfp4 = mx.quantized_matmul(x, ones, exponents, group_size=32, bits=4, mode="mxfp4")[0, 0].item()
    print(f"{kind}: affine {affine}, MXFP4 {mxfp4}, expected {K}")
for kind in (mx.float32, mx.float16):
    x = mx.full((1, 32), 2.0**-14, dtype=kind)
    y = mx.quantized_matmul(x, ones[:, :4], exponents[:, :1] + 20, group_size=32, bits=4, mode="mxfp4")[0, 0].item()
    print(f"{kind}: 2^-14 times a weight of 2^20, 32 times: {y}, expected {32 * 2.0**6}")
