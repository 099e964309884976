//! Products with stored matrices as Rust kernels write them: slices, iterators, bfloat16 as its bits.
use std::slice::from_raw_parts;

fn brain(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

fn to_brain(number: f32) -> u16 {
    let bits = number.to_bits();
    if number.is_nan() {
        return (bits >> 16) as u16 | 64;
    }
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn half(bits: u16) -> f32 {
    let (exponent, mantissa) = ((bits >> 10 & 31) as i32, (bits & 1023) as f32);
    let size = if exponent == 0 { mantissa * 2f32.powi(-24) } else { (1024.0 + mantissa) * 2f32.powi(exponent - 25) };
    if bits >> 15 == 1 { -size } else { size }
}

fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = ((bits >> 3 & 15) as i32, (bits & 7) as f32);
    let size = if exponent == 0 { mantissa * 2f32.powi(-9) } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) };
    if bits & 128 != 0 { -size } else { size }
}

const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn e2m1(code: u8) -> f32 {
    let size = FP4[(code & 7) as usize];
    if code & 8 != 0 { -size } else { size }
}

/// # Safety
/// The arrays have the sizes of T x K, N x K/2, N x K/32 and T x N.
#[no_mangle]
pub unsafe extern "C" fn mxfp4(x: *const u16, elements: *const u8, scale: *const u8, y: *mut u16, t: usize, k: usize, n: usize) {
    for i in 0..t {
        let row = from_raw_parts(x.add(i * k), k);
        for j in 0..n {
            let octets = from_raw_parts(elements.add(j * k / 2), k / 2);
            let scales = from_raw_parts(scale.add(j * k / 32), k / 32);
            let mut sum = 0f32;
            for (b, block) in octets.chunks(16).enumerate() {
                let s = if scales[b] == 0 { 2f32.powi(-127) } else { f32::from_bits((scales[b] as u32) << 23) };
                let mut part = 0f32;
                for (p, octet) in block.iter().enumerate() {
                    part += brain(row[32 * b + 2 * p]) * e2m1(octet & 15);
                    part += brain(row[32 * b + 2 * p + 1]) * e2m1(octet >> 4);
                }
                sum += part * s;
            }
            *y.add(i * n + j) = to_brain(sum);
        }
    }
}

/// # Safety
/// The arrays have the sizes of T x K, N x K, N and T x N.
#[no_mangle]
pub unsafe extern "C" fn fp8_channel(x: *const u16, weight: *const u8, scale: *const f32, y: *mut u16, t: usize, k: usize, n: usize) {
    for i in 0..t {
        let row = from_raw_parts(x.add(i * k), k);
        for j in 0..n {
            let codes = from_raw_parts(weight.add(j * k), k);
            let sum: f32 = row.iter().zip(codes).map(|(a, b)| brain(*a) * e4m3(*b)).sum();
            *y.add(i * n + j) = to_brain(sum * *scale.add(j));
        }
    }
}

/// # Safety
/// The arrays have the sizes of T x K/32 x 34, N x K/32 x 18 and T x N.
#[no_mangle]
pub unsafe extern "C" fn q4_0_q8_0(x: *const u8, w: *const u8, y: *mut f32, t: usize, k: usize, n: usize) {
    let blocks = k / 32;
    for i in 0..t {
        let a = from_raw_parts(x.add(i * blocks * 34), blocks * 34);
        for j in 0..n {
            let b = from_raw_parts(w.add(j * blocks * 18), blocks * 18);
            let mut sum = 0f32;
            for (p, q) in a.chunks(34).zip(b.chunks(18)) {
                let (d_x, d) = (half(u16::from_le_bytes([p[0], p[1]])), half(u16::from_le_bytes([q[0], q[1]])));
                let mut dot = 0i32;
                for e in 0..16 {
                    let (low, high) = ((q[2 + e] & 15) as i32 - 8, (q[2 + e] >> 4) as i32 - 8);
                    dot += low * p[2 + e] as i8 as i32 + high * p[18 + e] as i8 as i32;
                }
                sum += d_x * d * dot as f32;
            }
            *y.add(i * n + j) = sum;
        }
    }
}
