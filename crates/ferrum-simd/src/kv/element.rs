//! What a cache holds: plain numbers, or bytes, which may have a scale for each token and kv head.

use super::{Pools, PoolsMut};
use crate::exec::{Exec, Scratch};
use crate::heads::Projection;
use crate::simd::{LANES, Simd};
use bytemuck::Zeroable;
use ferrum_quant::{fp8_codec, kv_int8};
use ferrum_types::check::Batch;
use ferrum_types::{
    AttnConfig, Dtype, Element, FloatElement, KvBf16, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8,
    Result,
};
use half::{bf16, f16};

/// An element of the CPU's caches. Its value is [`decode`](Self::decode) times the head's scale.
pub trait CpuKvElement: KvDtypeKind {
    /// What the pool holds.
    type Stored: Element;

    /// The scale of a head; 1 where the type has none.
    fn scale(head: &[f32]) -> f32;

    /// The element nearest to `x`, in a head of that scale.
    fn encode(x: f32, scale: f32) -> Self::Stored;

    /// What is stored, without its scale.
    fn decode(stored: Self::Stored) -> f32;

    /// Writes token-major keys and values of a batch to its slots. Where keys hold the values, nothing is read of
    /// the values.
    ///
    /// # Errors
    /// `InvalidArgument` for a batch that contradicts itself or names no block of the pool: then nothing is written.
    /// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
    ///
    /// # Panics
    /// When a slice is shorter than the shape says, or the pool is of other heads.
    fn append(
        run: (&Exec, &mut Scratch),
        pools: PoolsMut<'_, Self>,
        kv: (&[f32], &[f32]),
        batch: &Batch<'_>,
    ) -> Result<()>;

    /// Splits a projection: token-major q to `q`, k and v of a batch to its slots.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    ///
    /// # Panics
    /// As [`append`](Self::append).
    fn append_projection(
        run: (&Exec, &mut Scratch),
        pools: PoolsMut<'_, Self>,
        projection: Projection<'_>,
        q: &mut [f32],
        batch: &Batch<'_>,
    ) -> Result<()>;

    /// Attention of every query of a batch over its own sequence. `q` with a sink for each head, if there are.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    ///
    /// # Panics
    /// As [`append`](Self::append).
    fn attention(
        run: (&Exec, &mut Scratch),
        pools: Pools<'_, Self>,
        q: (&[f32], Option<&[f32]>),
        batch: Batch<'_>,
        out: &mut [f32],
        config: &AttnConfig,
    ) -> Result<()>;
}

/// The methods that are compiled here, once for each element, and not in each crate that is generic over it.
macro_rules! compiled {
    () => {
        fn append(
            run: (&Exec, &mut Scratch),
            pools: PoolsMut<'_, Self>,
            kv: (&[f32], &[f32]),
            batch: &Batch<'_>,
        ) -> Result<()> {
            super::append(run, pools, kv, batch)
        }

        fn append_projection(
            run: (&Exec, &mut Scratch),
            pools: PoolsMut<'_, Self>,
            projection: Projection<'_>,
            q: &mut [f32],
            batch: &Batch<'_>,
        ) -> Result<()> {
            super::append_projection(run, pools, projection, q, batch)
        }

        fn attention(
            run: (&Exec, &mut Scratch),
            pools: Pools<'_, Self>,
            q: (&[f32], Option<&[f32]>),
            batch: Batch<'_>,
            out: &mut [f32],
            config: &AttnConfig,
        ) -> Result<()> {
            super::attention(run, pools, q, batch, out, config)
        }
    };
}

macro_rules! plain {
    ($($kind:ty => $stored:ty, $encode:expr, $decode:expr;)*) => {$(
        impl CpuKvElement for $kind {
            type Stored = $stored;

            #[inline(always)]
            fn scale(_: &[f32]) -> f32 {
                1.0
            }

            #[inline(always)]
            fn encode(x: f32, _: f32) -> $stored {
                $encode(x)
            }

            #[inline(always)]
            fn decode(stored: $stored) -> f32 {
                $decode(stored)
            }

            compiled!();
        }
    )*};
}
plain! {
    KvF32 => f32, f32::from_f32, f32::to_f32;
    KvFp16 => f16, <f16 as FloatElement>::from_f32, FloatElement::to_f32;
    KvBf16 => bf16, <bf16 as FloatElement>::from_f32, FloatElement::to_f32;
    KvFp8 => u8, fp8_codec::e4m3_from_f32, fp8_codec::e4m3_to_f32;
}

impl CpuKvElement for KvInt8 {
    type Stored = i8;

    fn scale(head: &[f32]) -> f32 {
        kv_int8::scale_of(head)
    }

    #[inline(always)]
    fn encode(x: f32, scale: f32) -> i8 {
        kv_int8::encode(x, scale)
    }

    #[inline(always)]
    fn decode(stored: i8) -> f32 {
        f32::from(stored)
    }

    compiled!();
}

/// Up to sixteen numbers of a head of that scale, as they are stored; the rest is zero.
#[inline(always)]
pub(super) fn encode<S: Simd, K: CpuKvElement>(s: S, x: &[f32], scale: f32) -> [K::Stored; LANES] {
    let mut stored = [K::Stored::zeroed(); LANES];
    match (K::DTYPE, x.first_chunk::<LANES>()) {
        // SAFETY: f16 is what the dtype says that `stored` is made of, and both have 16 elements.
        (Dtype::F16, Some(x)) => unsafe {
            s.store_f16(stored.as_mut_ptr().cast(), s.load(x.as_ptr()));
        },
        _ => {
            for (i, x) in x.iter().enumerate() {
                stored[i] = K::encode(*x, scale);
            }
        }
    }
    stored
}

/// Sixteen stored elements as f32, without their scales.
///
/// # Safety
/// `p` is valid for reads of 16 elements.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, K: CpuKvElement>(s: S, p: *const K::Stored) -> S::V {
    // SAFETY: the dtype says what `Stored` is; the rest is the caller's contract.
    unsafe {
        match K::DTYPE {
            Dtype::F32 => s.load(p.cast()),
            Dtype::F16 => s.load_f16(p.cast()),
            Dtype::BF16 => s.load_bf16(p.cast()),
            Dtype::F8E4M3 => s.load_e4m3(p.cast()),
            Dtype::I8 => s.load_i8(p.cast()),
            _ => unreachable!("every kind of cache is above"),
        }
    }
}
