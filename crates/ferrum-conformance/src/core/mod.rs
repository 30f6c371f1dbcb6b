//! The ops of [`Backend`] itself, a file for each kind.

mod attention;
mod conv;
mod elementwise;
mod gemm;
mod heads;
mod memory;
mod norm;
mod refusals;
mod roles;

use crate::case::Cases;
use ferrum_kernels::Backend;

pub(crate) use gemm::GATES;
pub(crate) use heads::{KINDS, Transform, TransformBuffers, transformed};

/// Every case of the core ops.
pub(crate) fn cases<B: Backend>() -> Cases<B> {
    let mut cases = Cases::new();
    memory::cases(&mut cases);
    gemm::cases(&mut cases);
    norm::cases(&mut cases);
    elementwise::cases(&mut cases);
    heads::cases(&mut cases);
    attention::cases(&mut cases);
    conv::cases(&mut cases);
    roles::cases(&mut cases);
    refusals::cases(&mut cases);
    cases
}
