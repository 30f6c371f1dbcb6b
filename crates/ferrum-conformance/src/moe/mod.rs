//! Mixture of experts: routing, per-expert products over every kind of stack, weighted sums.

mod experts;
mod refusals;
mod routing;
mod sums;

use crate::case::Cases;
use ferrum_kernels::{BackendMarlinExperts, BackendMoeFused, BackendQuantExperts};

/// Every case of [`BackendMoeFused`] alone.
pub(crate) fn cases<B: BackendMoeFused>() -> Cases<B> {
    let mut cases = Cases::new();
    routing::cases(&mut cases);
    experts::dense_cases(&mut cases);
    sums::cases(&mut cases);
    refusals::cases(&mut cases);
    cases
}

/// Every case of stacks of GGUF blocks.
pub(crate) fn gguf_cases<B: BackendQuantExperts>() -> Cases<B> {
    let mut cases = Cases::new();
    experts::gguf_cases(&mut cases);
    cases
}

/// Every case of stacks of GPTQ and AWQ layers.
pub(crate) fn marlin_cases<B: BackendMarlinExperts>() -> Cases<B> {
    let mut cases = Cases::new();
    experts::marlin_cases(&mut cases);
    cases
}
