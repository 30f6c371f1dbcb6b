//! The error of everything that computes: kernels, models and the engine share it.
//!
//! Crates that read outside data (formats, the server) have enums of their own with the facts of
//! their field and convert into this one at the border.

use crate::Dtype;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between a loaded model and its logits.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A backend cannot do this op in this form; nothing was computed.
    #[error("{backend} cannot run {op}: {reason}{}", hint_line(.hint))]
    Unsupported {
        /// Name of the op (`flash_attention`, `load_quant`, …).
        op: &'static str,
        /// Name of the backend (`cpu`, `vulkan`, …).
        backend: &'static str,
        /// What exactly is not supported.
        reason: String,
        /// What the user can do instead; empty when there is nothing.
        hint: String,
    },
    /// A buffer or a weight does not have the size its shape asks for.
    #[error("{op}: {what} has {found} elements, expected {expected}")]
    Shape {
        /// Name of the op.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// Elements found.
        found: usize,
        /// Elements expected (at least).
        expected: usize,
    },
    /// An argument outside its allowed range.
    #[error("{op}: {reason}")]
    InvalidArgument {
        /// Name of the op or function.
        op: &'static str,
        /// What was found and what was expected.
        reason: String,
    },
    /// A buffer with another element type than the call needs.
    #[error("{op}: found dtype {found}, expected {expected}")]
    DtypeMismatch {
        /// Name of the op.
        op: &'static str,
        /// Found dtype.
        found: Dtype,
        /// Expected dtype.
        expected: Dtype,
    },
    /// No such device, or its driver is missing.
    #[error("no {backend} device: {reason}{}", hint_line(.hint))]
    NoDevice {
        /// Name of the backend.
        backend: &'static str,
        /// Which part was missing.
        reason: String,
        /// What the user can do; empty when there is nothing.
        hint: String,
    },
    /// The device has not enough memory.
    #[error("{backend} is out of memory: {requested} bytes requested, {reason}")]
    OutOfMemory {
        /// Name of the backend.
        backend: &'static str,
        /// Size of the failed request.
        requested: u64,
        /// What the device said or which limit was met.
        reason: String,
    },
    /// The device failed (lost device, driver error, failed submission).
    #[error("{backend} failed in {op}: {reason}")]
    Device {
        /// Name of the backend.
        backend: &'static str,
        /// What was being done.
        op: &'static str,
        /// The device's own words.
        reason: String,
    },
    /// A model file is wrong or incomplete; carries the loader's full sentence.
    #[error("{0}")]
    Model(String),
    /// More tokens than the model's context or the KV pool can hold.
    #[error(
        "context overflow: {requested} tokens requested, the context holds {capacity}\nhint: shorten the prompt, lower --max-tokens or raise --context"
    )]
    ContextOverflow {
        /// Tokens needed.
        requested: usize,
        /// Tokens that fit.
        capacity: usize,
    },
}

fn hint_line(hint: &str) -> String {
    if hint.is_empty() {
        String::new()
    } else {
        format!("\nhint: {hint}")
    }
}

impl Error {
    /// Shorthand for [`Error::InvalidArgument`].
    pub fn invalid(op: &'static str, reason: impl Into<String>) -> Self {
        Error::InvalidArgument {
            op,
            reason: reason.into(),
        }
    }

    /// `Ok` when `found >= expected`, else [`Error::Shape`].
    pub fn check_len(
        op: &'static str,
        what: &'static str,
        found: usize,
        expected: usize,
    ) -> Result<()> {
        if found >= expected {
            Ok(())
        } else {
            Err(Error::Shape {
                op,
                what,
                found,
                expected,
            })
        }
    }
}
