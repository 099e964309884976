//! More products with stored matrices in Rust: words by their nibbles, and blocks by slices. bfloat16 is its bits.
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

fn half_at(block: &[u8], place: usize) -> f32 {
    half(u16::from_le_bytes([block[place], block[place + 1]]))
}

/// GPTQ of 4 bits, zeros stored less one.
///
/// # Safety
/// The arrays have the sizes of T x K, K/8 x N, G x N/8, G x N, K and T x N.
#[no_mangle]
pub unsafe extern "C" fn gptq(x: *const u16, qweight: *const u32, qzeros: *const u32, scales: *const u16, g_idx: *const i32, y: *mut u16, t: usize, k: usize, n: usize) {
    for i in 0..t {
        let row = from_raw_parts(x.add(i * k), k);
        for j in 0..n {
            let mut sum = 0f32;
            for (p, a) in row.iter().enumerate() {
                let g = *g_idx.add(p) as usize;
                let code = (*qweight.add(p / 8 * n + j) >> (4 * (p % 8)) & 15) as i32;
                let zero = (*qzeros.add(g * (n / 8) + j / 8) >> (4 * (j % 8)) & 15) as i32 + 1;
                sum += brain(*a) * (half(*scales.add(g * n + j)) * (code - zero) as f32);
            }
            *y.add(i * n + j) = to_brain(sum);
        }
    }
}

const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// AWQ, layout gemm; one vector. A group is scaled after its sum.
///
/// # Safety
/// The arrays have the sizes of K, K x N/8, G x N/8, G x N and N.
#[no_mangle]
pub unsafe extern "C" fn awq(x: *const u16, qweight: *const u32, qzeros: *const u32, scales: *const u16, y: *mut u16, k: usize, n: usize, group_size: usize) {
    let row = from_raw_parts(x, k);
    for j in 0..n {
        let shift = 4 * PLACES[j % 8];
        let mut sum = 0f32;
        for (g, run) in row.chunks(group_size).enumerate() {
            let zero = (*qzeros.add(g * (n / 8) + j / 8) >> shift & 15) as i32;
            let mut part = 0f32;
            for (p, a) in run.iter().enumerate() {
                let code = (*qweight.add((g * group_size + p) * (n / 8) + j / 8) >> shift & 15) as i32;
                part += brain(*a) * (code - zero) as f32;
            }
            sum += half(*scales.add(g * n + j)) * part;
        }
        *y.add(j) = to_brain(sum);
    }
}

fn scale_min(packed: &[u8], j: usize) -> (i32, i32) {
    let (scale, minimum) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4), (packed[j + 4] >> 4) | (packed[j] >> 6 << 4))
    };
    (scale as i32, minimum as i32)
}

/// Q4_K times Q8_K: integer sums, minima by the sums that the activations carry.
///
/// # Safety
/// The arrays have the sizes of T x K/256 x 292, N x K/256 x 144 and T x N.
#[no_mangle]
pub unsafe extern "C" fn q4_k_q8_k(x: *const u8, w: *const u8, y: *mut f32, t: usize, k: usize, n: usize) {
    let blocks = k / 256;
    for i in 0..t {
        let a = from_raw_parts(x.add(i * blocks * 292), blocks * 292);
        for j in 0..n {
            let b = from_raw_parts(w.add(j * blocks * 144), blocks * 144);
            let mut total = 0f32;
            for (p, q) in a.chunks(292).zip(b.chunks(144)) {
                let d_x = f32::from_le_bytes([p[0], p[1], p[2], p[3]]);
                let (mut products, mut minima) = (0i32, 0i32);
                for run in 0..8 {
                    let (scale, minimum) = scale_min(&q[4..16], run);
                    let mut dot = 0i32;
                    for e in 0..32 {
                        let octet = q[16 + 32 * (run / 2) + e];
                        let code = if run % 2 == 1 { octet >> 4 } else { octet & 15 };
                        dot += code as i32 * p[4 + 32 * run + e] as i8 as i32;
                    }
                    products += scale * dot;
                    for s in [2 * run, 2 * run + 1] {
                        minima += minimum * i16::from_le_bytes([p[260 + 2 * s], p[261 + 2 * s]]) as i32;
                    }
                }
                total += d_x * (half_at(q, 0) * products as f32 - half_at(q, 2) * minima as f32);
            }
            *y.add(i * n + j) = total;
        }
    }
}
