//! In what form the weights of a file are kept on a device.
//!
//! A form is a choice at load; the forward path sees [`Linear`](crate::Linear) and [`Embedding`] only.

use crate::load::to_f32;
use ferrum_formats::{TensorSource, TensorView};
use ferrum_kernels::{
    Act, Backend, BackendQuantGguf, GemmShape, LlmBackend, QuantPart, RowShape, WeightPart,
};
use ferrum_types::{Dtype, GgufQuantType, Result, SrcDtype};
use std::borrow::Cow;

/// How matrices are loaded and used.
pub trait WeightForm<B: Backend>: 'static {
    /// A matrix on the device.
    type Matrix: Send + Sync;

    /// Loads one matrix from parts `(tensor, rows)`, one below the other, with rows of `cols` numbers.
    ///
    /// # Errors
    /// [`Error::Model`](ferrum_types::Error::Model) for an element type that is no number of a weight;
    /// otherwise what the device says.
    fn load(
        device: &B,
        tensors: &dyn TensorSource,
        parts: &[(TensorView<'_>, usize)],
        cols: usize,
    ) -> Result<Self::Matrix>;

    /// As [`Backend::gemm`].
    fn gemm(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &Self::Matrix,
        out: &mut Act<B>,
        shape: GemmShape,
    ) -> Result<()>;

    /// As [`Backend::embedding_lookup`].
    fn lookup(
        ctx: &mut B::Context,
        table: &Self::Matrix,
        ids: &B::Buffer<i32>,
        out: &mut Act<B>,
        shape: RowShape,
    ) -> Result<()>;
}

/// Floats as they are in the file, block formats expanded to f32: for every backend.
#[derive(Clone, Copy, Debug)]
pub struct Expanded;

/// Floats and block formats as they are in the file.
#[derive(Clone, Copy, Debug)]
pub struct Native;

/// A matrix in the form [`Native`].
pub enum NativeMatrix<B: BackendQuantGguf> {
    /// Floats.
    Dense(B::Weight),
    /// ggml blocks, possibly with floats below them.
    Blocks(B::GgufWeight),
}

impl<B: LlmBackend> WeightForm<B> for Expanded {
    type Matrix = B::Weight;

    fn load(
        device: &B,
        tensors: &dyn TensorSource,
        parts: &[(TensorView<'_>, usize)],
        cols: usize,
    ) -> Result<B::Weight> {
        let dense = parts
            .iter()
            .map(|(view, rows)| {
                let (bytes, dtype) = dense_bytes(tensors, view)?;
                Ok((bytes, dtype, *rows))
            })
            .collect::<Result<Vec<_>>>()?;
        let parts: Vec<WeightPart<'_>> = dense
            .iter()
            .map(|(bytes, dtype, rows)| WeightPart {
                bytes,
                dtype: *dtype,
                rows: *rows,
            })
            .collect();
        device.from_weight_parts(&parts, cols)
    }

    fn gemm(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &B::Weight,
        out: &mut Act<B>,
        shape: GemmShape,
    ) -> Result<()> {
        B::gemm(ctx, x, matrix, out, shape)
    }

    fn lookup(
        ctx: &mut B::Context,
        table: &B::Weight,
        ids: &B::Buffer<i32>,
        out: &mut Act<B>,
        shape: RowShape,
    ) -> Result<()> {
        B::embedding_lookup(ctx, table, ids, out, shape)
    }
}

impl<B: LlmBackend + BackendQuantGguf> WeightForm<B> for Native {
    type Matrix = NativeMatrix<B>;

    fn load(
        device: &B,
        tensors: &dyn TensorSource,
        parts: &[(TensorView<'_>, usize)],
        cols: usize,
    ) -> Result<NativeMatrix<B>> {
        let block_type = |view: &TensorView<'_>| match view.dtype.plain() {
            Some(Dtype::F32) => Some(GgufQuantType::F32),
            Some(Dtype::F16) => Some(GgufQuantType::F16),
            Some(Dtype::BF16) => Some(GgufQuantType::BF16),
            Some(_) => None,
            None => view.dtype.quant(),
        };
        let blocks: Option<Vec<QuantPart<'_>>> = parts
            .iter()
            .map(|(view, rows)| {
                Some(QuantPart {
                    bytes: view.bytes,
                    ty: block_type(view)?,
                    rows: *rows,
                })
            })
            .collect();
        match blocks {
            Some(parts) if parts.iter().any(|part| part.ty.is_quantized()) => device
                .load_quant_fused(&parts, cols)
                .map(NativeMatrix::Blocks),
            _ => Expanded::load(device, tensors, parts, cols).map(NativeMatrix::Dense),
        }
    }

    fn gemm(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &NativeMatrix<B>,
        out: &mut Act<B>,
        shape: GemmShape,
    ) -> Result<()> {
        match matrix {
            NativeMatrix::Dense(weight) => B::gemm(ctx, x, weight, out, shape),
            NativeMatrix::Blocks(weight) => B::gemm_quant(ctx, x, weight, out, shape),
        }
    }

    fn lookup(
        ctx: &mut B::Context,
        table: &NativeMatrix<B>,
        ids: &B::Buffer<i32>,
        out: &mut Act<B>,
        shape: RowShape,
    ) -> Result<()> {
        match table {
            NativeMatrix::Dense(weight) => B::embedding_lookup(ctx, weight, ids, out, shape),
            NativeMatrix::Blocks(weight) => B::embedding_lookup_quant(ctx, weight, ids, out, shape),
        }
    }
}

/// A tensor's bytes in a dtype that every backend can load; block formats are expanded to f32.
fn dense_bytes<'a>(
    tensors: &dyn TensorSource,
    view: &TensorView<'a>,
) -> Result<(Cow<'a, [u8]>, SrcDtype)> {
    let plain = view.dtype.plain().and_then(SrcDtype::from_dtype);
    match plain {
        Some(dtype) => Ok((Cow::Borrowed(view.bytes), dtype)),
        None => {
            let values = to_f32(tensors, view)?;
            Ok((
                Cow::Owned(bytemuck::allocation::pod_collect_to_vec(&values)),
                SrcDtype::F32,
            ))
        }
    }
}
