//! One suite of op cases, run against any backend.
//!
//! A case hands an op of the kernel contract inputs that follow from the case's name, and compares
//! what it wrote with what the reference backend writes; the reference backend itself is held
//! against formulas that share nothing with it. The tolerances are those of one table. Besides
//! values, cases check that nothing past the shape is read or written, that a buffer too short is a
//! shape error, and that the bits of a row do not depend on its company (other rows, chunks, blocks).
//!
//! [`run_reference`], [`run_cpu`], [`run_cuda`] and [`run_gpu`] put a backend of the workspace through everything;
//! the other functions are the parts, for backends of other crates. What a backend does
//! not implement is in the [`Report`] too, as skipped.
//!
//! Cases live in the file of what they test: `core/` for the ops of every backend, `paged.rs`,
//! `state.rs`, `gguf.rs`, `marlin.rs`, `moe.rs`, `sample.rs`, `collective.rs` and `runtime.rs` (graphs, timers) for capabilities.
//! [`minimal`] is a backend of the suite's own, with what the workspace's others lack: it is recorded, overlaps, and
//! replays graphs.
//!
//! A new op needs its inputs as a struct, a function that runs it on any backend, its formula, and
//! a line for each shape.

mod case;
mod collective;
mod compare;
mod core;
mod data;
mod gguf;
mod io;
mod layers;
mod linear_attention;
mod marlin;
pub mod minimal;
mod moe;
mod naive;
mod paged;
mod report;
mod run;
mod runtime;
mod sample;
mod state;

pub use case::{Case, Filter};
pub use report::{Counts, Outcome, Report, Row};
#[cfg(feature = "gpu")]
pub use run::run_gpu;
#[cfg(feature = "cuda")]
pub use run::{CudaSuite, run_cuda};
pub use run::{
    cases, ops, run_absent, run_collective, run_collective_on, run_core, run_cpu, run_gguf,
    run_graph, run_int8_kv, run_marlin, run_moe, run_moe_gguf, run_moe_marlin, run_paged,
    run_precision, run_reference, run_sample, run_state, run_timer, self_check,
};
