//! A backend in Rust: packing and unpacking of codes, and one product with 4-bit weights.
//!
//!     rustc --edition 2021 -O --crate-type cdylib -C panic=abort mine.rs -o libmine.so
//!     lowbit conformance --library ./libmine.so
//!
//! The first part says in Rust what lowbit.h says in C; the second is the backend.

use std::ffi::{c_char, c_void, CStr};
use std::slice;

// ---- lowbit.h ----

const ABI: u32 = 1;
const OK: i32 = 0;
const NOT_DECLARED: i32 = 1;
const FAILED: i32 = 3;
const ARRAY: i32 = 5;

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

/// An element type, by its number in lowbit.h.
trait Element: Copy {
    const DTYPE: i32;
}
impl Element for u8 {
    const DTYPE: i32 = 6;
}
impl Element for u32 {
    const DTYPE: i32 = 8;
}
impl Element for f32 {
    const DTYPE: i32 = 11;
}

type Answer<T> = Result<T, String>;

impl Call {
    // What these functions lend lives as long as the call, which is as long as any function of this file runs; the
    // lifetime 'a stands for that.

    fn argument<'a>(&self, path: &str) -> Answer<&'a Value> {
        let mut at = self.arguments as *const u8;
        for _ in 0..self.count {
            // SAFETY: the caller's list has `count` values, each as long as it says.
            let value = unsafe { &*(at as *const Value) };
            if unsafe { CStr::from_ptr(value.path) }.to_bytes() == path.as_bytes() {
                return Ok(value);
            }
            at = unsafe { at.add(value.size as usize) };
        }
        Err(format!("no argument {path}"))
    }

    fn integer(&self, path: &str) -> Answer<usize> {
        usize::try_from(self.argument(path)?.integer).map_err(|_| format!("{path} is below 0"))
    }

    /// The elements of an array and its sizes.
    fn array<'a, T: Element>(&self, path: &str) -> Answer<(&'a [T], &'a [i64])> {
        let value = self.argument(path)?;
        if value.kind != ARRAY || value.dtype != T::DTYPE {
            return Err(format!("{path} is no array of this type"));
        }
        // SAFETY: arrays have been checked to be contiguous and aligned.
        unsafe {
            let shape = slice::from_raw_parts(value.shape, value.ndim as usize);
            let length = shape.iter().product::<i64>() as usize;
            Ok((slice::from_raw_parts(value.data as *const T, length), shape))
        }
    }

    /// The memory that the caller hands out for the result, filled with zeros.
    fn result<'a, T: Element>(&mut self, shape: &[usize]) -> Answer<&'a mut [T]> {
        let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let length = shape.iter().product();
        // SAFETY: the caller gives room for all elements of this shape, or NULL; zero is a value of every `Element`.
        unsafe {
            let data = (self.result)(
                self,
                c"result".as_ptr(),
                ARRAY,
                T::DTYPE,
                sizes.len() as i32,
                sizes.as_ptr(),
            );
            if data.is_null() {
                return Err("the caller has no memory for the result".to_string());
            }
            (data as *mut T).write_bytes(0, length);
            Ok(slice::from_raw_parts_mut(data as *mut T, length))
        }
    }

    fn say(&mut self, message: &str) {
        let length = message.len().min(self.message_size.saturating_sub(1));
        // SAFETY: the buffer is the caller's, of `message_size` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(message.as_ptr(), self.message as *mut u8, length);
            *self.message.add(length) = 0;
        }
    }
}

/// Runs `work` and turns what it answers into a status, with the message where the caller wants it.
unsafe fn status(call: *mut Call, work: impl FnOnce(&mut Call) -> Answer<i32>) -> i32 {
    let call = &mut *call;
    work(call).unwrap_or_else(|message| {
        call.say(&message);
        FAILED
    })
}

// ---- The backend. ----

const CAPABILITIES: &CStr = cr#"{
  "name": "mine-rust", "version": "1.0", "concurrent": true,
  "operations": {
    "packing.pack": {},
    "packing.unpack": {},
    "linear.qgemv": {
      "limits": {"bits": [4], "convention": ["minimum"], "scale_dtype": ["float32"]},
      "arithmetic": {"form": "dequantised", "accumulator": "float32", "roundings": "any_order"}
    }
  }
}"#;

/// Codes, K x N, to words. Each column is one stream of bits, least significant first; a code of 3 bits may begin in
/// one word and end in the next.
fn pack(call: &mut Call) -> Answer<i32> {
    let bits = call.integer("bits")?;
    let (codes, shape) = call.array::<u8>("codes")?;
    let (rows, columns) = (shape[0] as usize, shape[1] as usize);
    let words = call.result::<u32>(&[rows * bits / 32, columns])?;
    for (k, row) in codes.chunks_exact(columns).enumerate() {
        let (word, shift) = (k * bits / 32, k * bits % 32);
        for (n, &code) in row.iter().enumerate() {
            let code = u64::from(code) << shift;
            words[word * columns + n] |= code as u32;
            if shift + bits > 32 {
                words[(word + 1) * columns + n] |= (code >> 32) as u32;
            }
        }
    }
    Ok(OK)
}

/// The other way.
fn unpack(call: &mut Call) -> Answer<i32> {
    let bits = call.integer("bits")?;
    let (words, shape) = call.array::<u32>("words")?;
    let (rows, columns) = (shape[0] as usize * 32 / bits, shape[1] as usize);
    let codes = call.result::<u8>(&[rows, columns])?;
    for (k, row) in codes.chunks_exact_mut(columns).enumerate() {
        let (word, shift) = (k * bits / 32, k * bits % 32);
        for (n, place) in row.iter_mut().enumerate() {
            let mut code = u64::from(words[word * columns + n]);
            if shift + bits > 32 {
                code |= u64::from(words[(word + 1) * columns + n]) << 32;
            }
            *place = (code >> shift & ((1 << bits) - 1)) as u8;
        }
    }
    Ok(OK)
}

/// Weights are made ready once. This copies them, for the caller's arrays may not be used after the call; a real kernel
/// would put them into an order of its own here.
struct Matrix {
    columns: usize,
    group_size: usize,
    words: Vec<u32>,
    scales: Vec<f32>,
    minima: Vec<f32>,
}

impl Matrix {
    fn new(call: &Call) -> Answer<Matrix> {
        let (words, shape) = call.array::<u32>("matrix.words")?;
        Ok(Matrix {
            columns: shape[1] as usize,
            group_size: call.integer("matrix.group_size")?,
            words: words.to_vec(),
            scales: call.array::<f32>("matrix.scales")?.0.to_vec(),
            minima: call.array::<f32>("matrix.zeros")?.0.to_vec(),
        })
    }

    /// y = x W with w = scale * code + minimum, one row of W at a time: each y is a sum of K products in f32, which is
    /// what `dequantised`, `float32` and `any_order` declare.
    fn multiply(&self, call: &mut Call) -> Answer<i32> {
        let (x, _) = call.array::<f32>("x")?;
        let y = call.result::<f32>(&[self.columns])?;
        for (k, &x) in x.iter().enumerate() {
            let words = &self.words[k / 8 * self.columns..];
            let scales = &self.scales[k / self.group_size * self.columns..];
            let minima = &self.minima[k / self.group_size * self.columns..];
            for (n, y) in y.iter_mut().enumerate() {
                let code = words[n] >> (k % 8 * 4) & 15;
                *y += x * (scales[n] * code as f32 + minima[n]);
            }
        }
        Ok(OK)
    }
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
/// `call` and `handle` are what lowbit.h says.
#[no_mangle]
pub unsafe extern "C" fn lowbit_prepare(call: *mut Call, handle: *mut *mut c_void) -> i32 {
    status(call, |call| {
        *handle = Box::into_raw(Box::new(Matrix::new(call)?)) as *mut c_void;
        Ok(OK)
    })
}

/// # Safety
/// `handle` comes from `lowbit_prepare`, and comes back once.
#[no_mangle]
pub unsafe extern "C" fn lowbit_release(handle: *mut c_void) {
    drop(Box::from_raw(handle as *mut Matrix));
}

/// # Safety
/// `call` is what lowbit.h says.
#[no_mangle]
pub unsafe extern "C" fn lowbit_run(call: *mut Call) -> i32 {
    status(call, |call| {
        match CStr::from_ptr(call.operation).to_bytes() {
            b"packing.pack" => pack(call),
            b"packing.unpack" => unpack(call),
            b"linear.qgemv" => (*(call.handle as *const Matrix)).multiply(call),
            _ => Ok(NOT_DECLARED),
        }
    })
}
