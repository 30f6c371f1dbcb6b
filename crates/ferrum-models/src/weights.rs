//! In what form the weights of a file are kept on a device.
//!
//! A form is a choice at load; the forward path sees [`Linear`](crate::Linear) and [`Embedding`] only.

use crate::experts::{ExpertSource, ExpertStacks, Experts};
use crate::spec::MoeSpec;
use ferrum_kernels::{
    Act, Backend, ExpertShape, GemmShape, LlmBackend, QuantLlmBackend, QuantPart, QuantWeights,
    RowShape, WeightPart,
};
use ferrum_types::{Error, Result, SrcDtype};
use std::borrow::Cow;
use std::convert::Infallible;

/// How matrices are loaded and used.
pub trait WeightForm<B: Backend>: 'static {
    /// A matrix on the device.
    type Matrix: Send + Sync;
    /// A stack of expert matrices on the device; [`Infallible`] where there are no kernels for them.
    type Stack: Send + Sync;

    /// Whether experts are loaded in this form.
    const EXPERTS: bool;

    /// Loads one matrix from parts, one below the other, with rows of `cols` numbers.
    ///
    /// # Errors
    /// What the device says.
    fn load(device: &B, parts: &[QuantWeights<'_>], cols: usize) -> Result<Self::Matrix>;

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

    /// Loads one stack of expert matrices.
    ///
    /// # Errors
    /// As [`load`](Self::load); `Unsupported` where there are no kernels for experts.
    fn load_stack(device: &B, source: &ExpertSource<'_>, shape: ExpertShape)
    -> Result<Self::Stack>;

    /// The experts of one layer, of stacks that were loaded.
    fn experts(stacks: ExpertStacks<Self::Stack>, spec: &MoeSpec) -> Box<dyn Experts<B>>;
}

/// What a backend without expert kernels says.
pub(crate) fn no_experts<B: Backend>() -> Error {
    Error::Unsupported {
        op: "load_experts",
        backend: B::NAME,
        reason: "it has no kernels for mixtures of experts".into(),
        hint: "use --backend cpu".into(),
    }
}

/// The expert part of a [`WeightForm`] that has none.
macro_rules! without_experts {
    ($b:ty) => {
        type Stack = Infallible;

        const EXPERTS: bool = false;

        fn load_stack(_: &$b, _: &ExpertSource<'_>, _: ExpertShape) -> Result<Infallible> {
            Err(no_experts::<$b>())
        }

        fn experts(stacks: ExpertStacks<Infallible>, _: &MoeSpec) -> Box<dyn Experts<$b>> {
            match stacks.gate {}
        }
    };
}

/// Floats as they are in the file, all else expanded to f32: for every backend.
#[derive(Clone, Copy, Debug)]
pub struct Expanded;

/// Floats as they are in the file, and quantised weights as the backend computes on them.
#[derive(Clone, Copy, Debug)]
pub struct Native;

/// A matrix in the form [`Native`].
pub enum NativeMatrix<B: QuantLlmBackend> {
    /// Floats.
    Dense(B::Weight),
    /// ggml blocks, possibly with floats below them.
    Blocks(B::GgufWeight),
    /// Layers of a quantised checkpoint, possibly with others below them.
    Layers(B::GptqWeight),
}

impl<B: LlmBackend> WeightForm<B> for Expanded {
    type Matrix = B::Weight;
    without_experts!(B);

    fn load(device: &B, parts: &[QuantWeights<'_>], cols: usize) -> Result<B::Weight> {
        let dense = parts
            .iter()
            .map(|part| {
                let (bytes, dtype) = dense_bytes(part, cols)?;
                Ok((bytes, dtype, part.rows()))
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

impl<B: QuantLlmBackend> WeightForm<B> for Native {
    type Matrix = NativeMatrix<B>;
    without_experts!(B);

    fn load(device: &B, parts: &[QuantWeights<'_>], cols: usize) -> Result<NativeMatrix<B>> {
        let blocks: Option<Vec<QuantPart<'_>>> = parts
            .iter()
            .map(|part| match part {
                QuantWeights::Gguf(part) => Some(*part),
                _ => None,
            })
            .collect();
        match blocks {
            Some(blocks) if blocks.iter().any(|part| part.ty.is_quantized()) => device
                .load_quant_fused(&blocks, cols)
                .map(NativeMatrix::Blocks),
            Some(_) => Expanded::load(device, parts, cols).map(NativeMatrix::Dense),
            None => device
                .load_layers_fused(parts, cols)
                .map(NativeMatrix::Layers),
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
            NativeMatrix::Layers(weight) => B::gemm_gptq(ctx, x, weight, out, shape),
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
            // The loader takes no such table.
            NativeMatrix::Layers(_) => Err(Error::invalid(
                "embedding_lookup",
                "the table is a layer of a quantised checkpoint",
            )),
        }
    }
}

/// A part's bytes in a dtype that every backend can load: floats as they are, the rest in f32.
pub(crate) fn dense_bytes<'a>(
    part: &QuantWeights<'a>,
    cols: usize,
) -> Result<(Cow<'a, [u8]>, SrcDtype)> {
    if let (Some(dtype), QuantWeights::Gguf(part)) = (part.floats(), part) {
        return Ok((Cow::Borrowed(part.bytes), dtype));
    }
    let values = part.expand("load_weights", cols)?;
    let bytes = bytemuck::allocation::pod_collect_to_vec(&values);
    Ok((Cow::Owned(bytes), SrcDtype::F32))
}
