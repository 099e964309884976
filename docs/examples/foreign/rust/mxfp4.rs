//! MXFP4 in Rust: a vector of bfloat16 times 4-bit floats in blocks of 32, each with a power of two, to bfloat16.
//!
//!     rustc --edition 2021 -O --crate-type cdylib -C panic=abort mxfp4.rs -o libmxfp4.so
//!     lowbit conformance --library ./libmxfp4.so
//!
//! The first part says in Rust what lowbit.h says in C; the second is the backend.

use std::ffi::{c_char, c_void, CStr};
use std::slice;

// ---- lowbit.h, as far as it is needed ----

const ABI: u32 = 1;
const OK: i32 = 0;
const FAILED: i32 = 3;
const ARRAY: i32 = 5;
const UINT8: i32 = 6;
const BFLOAT16: i32 = 13; // crosses as its bit pattern, a u16
const FLOAT8_E8M0FNU: i32 = 19; // likewise, a u8

#[repr(C)]
pub struct Value {
    size: u32,
    kind: i32,
    path: *const c_char,
    dtype: i32,
    ndim: i32,
    shape: *const i64,
    strides: *const i64,
    data: *const c_void,
    integer: i64,
    real: f64,
    text: *const c_char,
}

type ResultFunction =
    unsafe extern "C" fn(*mut Call, *const c_char, i32, i32, i32, *const i64) -> *mut c_void;

#[repr(C)]
pub struct Call {
    size: u32,
    abi: u32,
    operation: *const c_char,
    handle: *mut c_void,
    count: i64,
    arguments: *const Value,
    result: ResultFunction,
    owner: *mut c_void,
    message: *mut c_char,
    message_size: usize,
}

impl Call {
    /// The elements of an array argument. They live as long as the call, which the lifetime 'a stands for.
    fn array<'a, T>(&self, path: &CStr, dtype: i32) -> Option<&'a [T]> {
        let mut at = self.arguments as *const u8;
        for _ in 0..self.count {
            // SAFETY: the caller's list has `count` values, each as long as it says; arrays are contiguous.
            unsafe {
                let value = &*(at as *const Value);
                if CStr::from_ptr(value.path) == path {
                    if value.kind != ARRAY || value.dtype != dtype {
                        return None;
                    }
                    let shape = slice::from_raw_parts(value.shape, value.ndim as usize);
                    let length = shape.iter().product::<i64>() as usize;
                    return Some(slice::from_raw_parts(value.data as *const T, length));
                }
                at = at.add(value.size as usize);
            }
        }
        None
    }

    /// The memory that the caller hands out for a vector of bfloat16.
    fn result(&mut self, length: usize) -> Option<*mut u16> {
        let path = c"result".as_ptr();
        // SAFETY: the caller's function, called as lowbit.h says.
        let data = unsafe { (self.result)(self, path, ARRAY, BFLOAT16, 1, &(length as i64)) };
        (!data.is_null()).then_some(data as *mut u16)
    }
}

// ---- The backend. ----

// A weight is exact: a power of two times a number of two bits. So what is declared is the sum, in f32, in any order;
// that the result is rounded to bfloat16 follows from its type. The profile is a claim, which a run of the whole suite
// certifies or refutes.
const CAPABILITIES: &CStr = cr#"{
  "name": "mxfp4-rust", "version": "1.0", "concurrent": true, "profiles": ["lowbit-1.1/mxfp4-gemv-bf16"],
  "operations": {
    "linear.gemv": {
      "limits": {"format": ["mxfp4"], "activations": ["bfloat16"], "result": ["bfloat16"]},
      "arithmetic": {"form": "dequantised", "accumulator": "float32", "roundings": "any_order", "weights": "exact"}
    }
  }
}"#;

/// e2m1: sign, two bits of exponent, one of mantissa.
const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// e8m0: 2^(pattern - 127). Pattern 0 is a subnormal f32; 255 is NaN, and refused before a library is called.
fn power_of_two(pattern: u8) -> f32 {
    f32::from_bits(if pattern == 0 { 1 << 22 } else { u32::from(pattern) << 23 })
}

/// bfloat16 is the upper half of an f32.
fn from_bfloat16(pattern: u16) -> f32 {
    f32::from_bits(u32::from(pattern) << 16)
}

/// The nearest bfloat16; of two, the even one.
fn to_bfloat16(number: f32) -> u16 {
    if number.is_nan() {
        return 0x7fc0;
    }
    let bits = number.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 // infinity stays, and what lies beyond the largest becomes it
}

/// y = x W. Column n of W is a row of memory: K/2 bytes of codes, of which the first of two is the low half, and K/32
/// scales.
fn gemv(call: &mut Call) -> Option<()> {
    let x = call.array::<u16>(c"x", BFLOAT16)?;
    let elements = call.array::<u8>(c"weights.elements", UINT8)?;
    let scales = call.array::<u8>(c"weights.scale", FLOAT8_E8M0FNU)?;
    let columns = scales.len() / (x.len() / 32);
    let y = call.result(columns)?;
    for n in 0..columns {
        let codes = &elements[n * x.len() / 2..];
        let scales = &scales[n * x.len() / 32..];
        let mut sum = 0.0;
        for (k, &x) in x.iter().enumerate() {
            let code = codes[k / 2] >> (k % 2 * 4) & 15;
            sum += from_bfloat16(x) * (power_of_two(scales[k / 32]) * E2M1[code as usize]);
        }
        // SAFETY: `y` has room for `columns` elements.
        unsafe { y.add(n).write(to_bfloat16(sum)) };
    }
    Some(())
}

// ---- What the library exports. ----

#[no_mangle]
pub extern "C" fn lowbit_abi_version() -> u32 {
    ABI
}

#[no_mangle]
pub extern "C" fn lowbit_capabilities() -> *const c_char {
    CAPABILITIES.as_ptr()
}

/// # Safety
/// `call` is what lowbit.h says.
#[no_mangle]
pub unsafe extern "C" fn lowbit_run(call: *mut Call) -> i32 {
    if gemv(&mut *call).is_some() { OK } else { FAILED }
}
