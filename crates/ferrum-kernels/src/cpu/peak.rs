//! What this machine can do at best, measured with the device's own threads: the yardsticks beside
//! which `ferrum bench` puts its figures.

pub use ferrum_simd::peak::{PackingTimes, median_seconds};

use super::CpuBackend;
use crate::backend::QuantWeights;
use ferrum_simd::peak;
use ferrum_types::Result;

/// Bytes per second that the device's threads read from memory together, in a typical pass.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) when there is no room for 256 MiB.
pub fn read_bandwidth(device: &CpuBackend) -> Result<f64> {
    peak::read_bandwidth(device.exec())
}

/// How fast a weight that takes `read` bytes is packed: medians.
///
/// # Errors
/// As [`load_layers_fused`](crate::BackendQuantMarlin::load_layers_fused).
pub fn packing(
    device: &CpuBackend,
    weights: &QuantWeights<'_>,
    cols: usize,
) -> Result<PackingTimes> {
    peak::packing(device.exec(), weights, cols)
}

/// f32 operations (a multiply-add counts two) per second of all the device's threads, in a
/// typical run.
pub fn fma_peak(device: &CpuBackend) -> f64 {
    peak::fma_peak(device.exec())
}

/// bf16 operations (a multiply-add counts two) per second of all the device's threads, in a typical
/// run, where products with weights of bf16 are made of such.
pub fn bf16_peak(device: &CpuBackend) -> Option<f64> {
    peak::bf16_peak(device.exec())
}

/// Operations on bytes (a multiply-add into wider integers counts two) per second of all the
/// device's threads, in a typical run: the limit of products with quantised weights.
pub fn byte_peak(device: &CpuBackend) -> f64 {
    peak::byte_peak(device.exec())
}
