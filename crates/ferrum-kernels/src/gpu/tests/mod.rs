//! What only this backend must prove, and every op against the reference at odd sizes; the
//! conformance suite goes further.

mod context;
mod invariance;
mod limits;
mod ops;
mod paged;
mod shaders;

use super::{GpuBackend, GpuConfig};
use ferrum_test_support::skip;
use ferrum_types::Error;
use std::sync::OnceLock;

/// The first device, shared by all tests; `None`, said aloud, where there is none.
pub(super) fn gpu() -> Option<&'static GpuBackend> {
    static DEVICE: OnceLock<Option<GpuBackend>> = OnceLock::new();
    let device = DEVICE
        .get_or_init(|| open_with(GpuConfig::default()))
        .as_ref();
    if device.is_none() {
        skip("no Vulkan device");
    }
    device
}

/// A device opened with `config`.
fn open_with(config: GpuConfig) -> Option<GpuBackend> {
    match GpuBackend::open_with(config) {
        Ok(device) => Some(device),
        Err(Error::NoDevice { .. }) => {
            skip("no Vulkan device");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// Numbers in -1..1 that depend on the seed alone.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Squared error over squared size.
fn nmse(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let pairs = || {
        found
            .iter()
            .zip(expected)
            .map(|(a, b)| (f64::from(*a), f64::from(*b)))
    };
    let size: f64 = pairs().map(|(_, e)| e * e).sum();
    let error: f64 = pairs().map(|(f, e)| (f - e) * (f - e)).sum();
    match error == 0.0 {
        true => 0.0,
        false => error / size.max(1e-30),
    }
}

/// Runs a body on the reference and on the GPU and compares the vectors that it gives.
///
/// In the body, `B` is the backend, and `?` works.
macro_rules! compare {
    ($what:expr, $limit:expr, |$dev:ident, $ctx:ident| $body:block) => {{
        fn open<B: $crate::backend::Backend>(device: &B) -> (B, B::Context) {
            (device.clone(), device.new_context().expect("context"))
        }
        let expected: Vec<f32> = {
            type B = crate::reference::ReferenceBackend;
            let ($dev, mut context) = open(&B::open(0).expect("reference"));
            let $ctx = &mut context;
            let mut run = || -> ferrum_types::Result<Vec<f32>> { $body };
            run().unwrap_or_else(|e| panic!("{} on the reference: {e}", $what))
        };
        if let Some(device) = crate::gpu::tests::gpu() {
            type B = crate::gpu::GpuBackend;
            let ($dev, mut context) = open(device);
            let $ctx = &mut context;
            let mut run = || -> ferrum_types::Result<Vec<f32>> { $body };
            let found = run().unwrap_or_else(|e| panic!("{}: {e}", $what));
            let error = crate::gpu::tests::nmse(&found, &expected);
            assert!(
                error <= $limit,
                "{}: error {error:e}, at most {:e}",
                $what,
                $limit
            );
        }
    }};
}
use compare;
