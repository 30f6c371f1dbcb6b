//! Every op against the reference, and bit for bit against itself: at every level of this machine, on
//! one thread and several, alone and among other rows, in chunks and whole.

mod attention;
mod matrices;
mod moe;
mod packed_store;
mod quant;
mod rows;
mod sum_split;

use super::{CpuBackend, CpuConfig, Isa};
use crate::backend::*;
use crate::reference::ReferenceBackend;
use ferrum_simd::isa::Level;
use ferrum_test_support::available;
use ferrum_types::FloatElement;

/// Random numbers with a seed (xorshift64*), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
}

/// The CPU in every form that must give the same bits.
fn devices() -> Vec<CpuBackend> {
    let mut out = Vec::new();
    for isa in available(Isa::ALL, Isa::is_available) {
        for threads in [1, 3] {
            let config = CpuConfig {
                threads: Some(threads),
                isa: Some(isa),
            };
            out.push(CpuBackend::with_config(config).unwrap());
        }
    }
    out
}

#[test]
fn encoders_split_where_no_level_was_asked_for() {
    let best = Isa::best();
    let level = |device: &CpuBackend| device.for_encoders().map(|device| device.isa());
    let expected = (best.for_encoders() != best).then(|| best.for_encoders());
    let device = CpuBackend::open(0).unwrap();
    assert_eq!(level(&device), expected);
    assert_eq!(level(&device.without_packed_store()), expected);
    for isa in available(Isa::ALL, Isa::is_available) {
        let config = CpuConfig {
            isa: Some(isa),
            ..CpuConfig::default()
        };
        assert_eq!(level(&CpuBackend::with_config(config).unwrap()), None);
    }
}

/// Mean squared error over mean square.
fn nmse(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f64| x * x;
    let pairs = found.iter().zip(expected);
    let error: f64 = pairs
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let power: f64 = expected.iter().map(|x| square(f64::from(*x))).sum();
    if error == 0.0 { 0.0 } else { error / power }
}

fn bits(x: &[f32]) -> Vec<u32> {
    // Which NaN is not part of a result.
    let canonical = |x: &f32| if x.is_nan() { f32::NAN } else { *x };
    x.iter().map(canonical).map(f32::to_bits).collect()
}

/// What a test runs on each backend.
trait Op {
    fn run<B: AnyBackend>(&self, device: &B) -> Vec<f32>;

    /// Whether weights of bf16 take part, which some levels multiply by rows that are rounded to bf16.
    fn has_bf16(&self) -> bool {
        false
    }

    /// The error of products of f32 whose numbers some levels split, if there are such.
    fn split_error(&self) -> Option<f64> {
        None
    }
}

/// Devices that round rows to bf16 where weights are: with one thread and several, in plain Rust, and by
/// instructions of this machine if it has any.
fn rounding_devices() -> Vec<CpuBackend> {
    let plain = [1, 3].map(|threads| CpuBackend::with_level(Level::base_bf16(), threads).unwrap());
    plain
        .into_iter()
        .chain(devices().into_iter().filter(rounds))
        .collect()
}

/// The error of rows that are rounded to bf16.
const BF16_ROWS: f64 = 1e-5;
/// The error of numbers that are split in two of bf16: 2^-17 of both factors and what the product of the low halves would add.
const SPLIT_NUMBERS: f64 = 5e-10;

/// Whether a level rounds rows to bf16 where weights are.
fn rounds(device: &CpuBackend) -> bool {
    device.exec().level.has_bf16()
}

/// A backend with caches of every element.
trait AnyBackend:
    LlmBackend
    + BackendKvDtype<KvFp16>
    + BackendKvDtype<KvBf16>
    + BackendKvDtype<KvFp8>
    + BackendKvDtype<KvInt8>
{
}

impl AnyBackend for CpuBackend {}
impl AnyBackend for ReferenceBackend {}

/// Runs `op` everywhere; the reference within `limit`, all CPU forms bit-equal (but for rounded rows and split numbers).
/// Gives the result.
fn check(what: &str, op: &impl Op, limit: f64) -> Vec<f32> {
    let expected = op.run(&ReferenceBackend::new());
    let (tiled, others): (Vec<_>, Vec<_>) = devices().into_iter().partition(|device| {
        let level = device.exec().level;
        level.splits_f32() && op.split_error().is_some() || level.has_tiles() && op.has_bf16()
    });
    let (rounding, exact): (Vec<_>, Vec<_>) = others
        .into_iter()
        .partition(|device| rounds(device) && op.has_bf16());
    let all_equal = |devices: &[CpuBackend], limit: f64| {
        let mut first = None;
        for device in devices {
            let found = op.run(device);
            let first = first.get_or_insert_with(|| {
                let error = nmse(&found, &expected);
                assert!(error <= limit, "{what}: error {error:e}, limit {limit:e}");
                found.clone()
            });
            assert!(bits(&found) == bits(first), "{what}: {device:?} differs");
        }
        first
    };
    all_equal(&rounding, BF16_ROWS);
    all_equal(&tiled, op.split_error().unwrap_or(BF16_ROWS));
    // There is always plain Rust.
    all_equal(&exact, limit).unwrap_or_default()
}

fn act<B: Backend>(device: &B, data: &[f32]) -> Act<B> {
    of_role(device, data)
}

/// A buffer of any role.
fn of_role<B: Backend, T: FloatElement>(device: &B, data: &[f32]) -> B::Buffer<T> {
    let data: Vec<T> = data.iter().map(|x| T::from_f32(*x)).collect();
    device.from_slice(&data).unwrap()
}

/// A buffer that no op may leave as it is.
fn poison<B: Backend>(device: &B, len: usize) -> Act<B> {
    act(device, &vec![f32::NAN; len])
}

fn host<B: Backend, T: FloatElement>(ctx: &mut B::Context, buffer: &B::Buffer<T>) -> Vec<f32> {
    let data = B::to_vec(ctx, buffer).unwrap();
    data.into_iter().map(T::to_f32).collect()
}

#[test]
fn a_device_says_what_it_is() {
    let device = CpuBackend::open(0).unwrap();
    let info = device.info();
    assert_eq!(info.backend, "cpu");
    assert!(info.detail.contains(device.isa().name()), "{info:?}");
    assert!(info.detail.contains(&device.threads().to_string()));
    assert!(CpuBackend::open(1).is_err());
    let config = CpuConfig {
        threads: Some(0),
        isa: None,
    };
    assert!(CpuBackend::with_config(config).is_err());
    for isa in Isa::ALL {
        let config = CpuConfig {
            threads: Some(1),
            isa: Some(isa),
        };
        assert_eq!(CpuBackend::with_config(config).is_ok(), isa.is_available());
    }
}

#[test]
fn two_contexts_on_two_threads_share_a_device() {
    let device = CpuBackend::with_config(CpuConfig {
        threads: Some(3),
        isa: None,
    })
    .unwrap();
    let (rows, n, k) = (33, 200, 300);
    let mut random = Random::new(1);
    let w: Vec<u8> = random
        .vec(n * k)
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let shape = MatShape { rows: n, cols: k };
    let weight = device
        .from_weight_bytes(&w, ferrum_types::SrcDtype::F32, shape)
        .unwrap();
    let inputs = [random.vec(rows * k), random.vec(rows * k)];
    let run = |x: &[f32]| {
        let mut ctx = device.new_context().unwrap();
        let x = act(&device, x);
        let mut out = poison(&device, rows * n);
        CpuBackend::gemm(&mut ctx, &x, &weight, &mut out, GemmShape { rows, n, k }).unwrap();
        host::<CpuBackend, _>(&mut ctx, &out)
    };
    let alone = inputs.each_ref().map(|x| run(x));
    std::thread::scope(|scope| {
        for (x, alone) in inputs.iter().zip(&alone) {
            let run = &run;
            scope.spawn(move || {
                for _ in 0..20 {
                    assert!(run(x) == *alone);
                }
            });
        }
    });
}

#[test]
fn spans_come_in_order() {
    let device = CpuBackend::open(0).unwrap();
    let mut ctx = device.new_context().unwrap();
    let mut timer = <CpuBackend as Backend>::Timer::new(&device).unwrap();
    assert!(timer.end(&mut ctx).is_err());
    timer.begin(&mut ctx, "outer").unwrap();
    timer.begin(&mut ctx, "inner").unwrap();
    timer.end(&mut ctx).unwrap();
    timer.end(&mut ctx).unwrap();
    let spans = timer.take_spans(&mut ctx).unwrap();
    let names: Vec<_> = spans.iter().map(|span| span.name).collect();
    assert_eq!(names, ["outer", "inner"]);
    assert!(spans[0].duration_ns >= spans[1].duration_ns);
}
