//! The words every Ferrum crate speaks: errors, dtypes, buffer elements and ids.
//!
//! This crate sits at the bottom of the tree. It knows nothing of files, kernels or models; what
//! belongs here is only what two crates on different branches of the tree must agree on.

mod dtype;
mod element;
mod error;
mod gguf_type;
mod ids;

pub use dtype::{Dtype, SrcDtype};
pub use element::{Element, FloatElement};
pub use error::{Error, Result};
pub use gguf_type::GgufQuantType;
pub use ids::{AdapterId, BlockId, SeqId, StateSlot, TokenId};
