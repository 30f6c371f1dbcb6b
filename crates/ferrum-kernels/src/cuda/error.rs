//! What the driver says of a call, as the errors of this crate.

use super::BACKEND;
use cudarc::driver::sys;
use ferrum_types::{Error, Result};
use std::ffi::CStr;
use std::ptr::null;

/// An error of the device in the name of `op`.
pub(super) fn failure(op: &'static str, reason: impl Into<String>) -> Error {
    Error::Device {
        backend: BACKEND,
        op,
        reason: reason.into(),
    }
}

pub(super) fn no_device(reason: impl Into<String>, hint: &str) -> Error {
    Error::NoDevice {
        backend: BACKEND,
        reason: reason.into(),
        hint: hint.into(),
    }
}

/// What the driver says of an error.
pub(super) fn words(code: sys::CUresult) -> String {
    let mut text = null();
    // SAFETY: the driver writes a pointer to a text of its own that ends with zero.
    unsafe {
        sys::cuGetErrorString(code, &mut text);
        match text.is_null() {
            true => format!("{code:?}"),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

pub(super) fn check(op: &'static str, code: sys::CUresult) -> Result<()> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(failure(op, words(code))),
    }
}
