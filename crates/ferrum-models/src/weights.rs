//! In what form the weights of a file are kept on a device.
//!
//! A form is a choice at load; the forward path sees [`Linear`](crate::Linear) and [`Embedding`] only.
//! Whether a weight stays as its file has it is asked of the form, by the loader as by the memory plan;
//! what does not stay is dequantised to floats here, before a backend sees it.
//!
//! [`Embedding`]: crate::Embedding

use crate::experts::{ExpertSource, ExpertStacks, ExpertSums, Experts, PerHeadLinear};
use crate::spec::MoeSpec;
use ferrum_kernels::{
    Act, Activation, Backend, ExpertShape, GemmShape, GgufRows, LlmBackend, QuantLlmBackend,
    QuantWeights, Residual, RowShape, WeightPart,
};
use ferrum_types::{Error, FloatElement, GgufQuantType, Result, SrcDtype, SumSplit};
use half::{bf16, f16};
use std::convert::Infallible;

/// What a matrix is loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixUse {
    /// Products.
    Products,
    /// Look-ups of its rows, and perhaps products.
    LookUps,
}

/// How matrices are loaded and used.
pub trait WeightForm<B: Backend>: 'static {
    /// A matrix on the device.
    type Matrix: Send + Sync;
    /// A stack of expert matrices on the device; [`Infallible`] where there are no kernels for them.
    type Stack: Send + Sync;

    /// Whether experts are loaded in this form.
    const EXPERTS: bool;

    /// Whether a matrix stays as its file has it. The others are dequantised to [`Backend::DEQUANTIZED_DTYPE`].
    fn keeps(weights: &QuantWeights<'_>) -> bool;

    /// Whether the experts of a stack stay as their file has them: all of them, or none.
    fn keeps_experts(source: &ExpertSource<'_>) -> bool;

    /// Loads one matrix from parts, one below the other, with rows of `cols` numbers.
    ///
    /// # Errors
    /// What the device says.
    fn load(
        device: &B,
        parts: &[QuantWeights<'_>],
        cols: usize,
        for_use: MatrixUse,
    ) -> Result<Self::Matrix>;

    /// As [`Backend::split_sums`].
    fn split_sums(matrix: &mut Self::Matrix, split: SumSplit);

    /// As [`Backend::gemm`].
    fn gemm<T: FloatElement>(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &Self::Matrix,
        out: &mut B::Buffer<T>,
        shape: GemmShape,
    ) -> Result<()>;

    /// As [`Backend::gemm_gated`].
    fn gemm_gated(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &Self::Matrix,
        activation: Activation,
        to: (&mut Act<B>, &mut Act<B>),
        shape: GemmShape,
    ) -> Result<()>;

    /// As [`Backend::embedding_lookup`].
    fn lookup(
        ctx: &mut B::Context,
        table: &Self::Matrix,
        ids: &B::Buffer<i32>,
        out: &mut Residual<B>,
        shape: RowShape,
    ) -> Result<()>;

    /// Loads one stack of expert matrices.
    ///
    /// # Errors
    /// As [`load`](Self::load); `Unsupported` where there are no kernels for experts.
    fn load_stack(device: &B, source: &ExpertSource<'_>, shape: ExpertShape)
    -> Result<Self::Stack>;

    /// As [`BackendMoeFused::split_expert_sums`](ferrum_kernels::BackendMoeFused::split_expert_sums).
    fn split_stack_sums(stack: &mut Self::Stack, split: SumSplit);

    /// The experts of one layer, of what a rank holds of their stacks, and how ranks share their sums.
    fn experts(
        stacks: ExpertStacks<B, Self::Stack>,
        spec: &MoeSpec,
        sums: ExpertSums<B>,
    ) -> Box<dyn Experts<B>>;

    /// The linear layers of a layer's heads, of a stack that was loaded.
    fn per_head_linear(stack: Self::Stack, shape: ExpertShape) -> Box<dyn PerHeadLinear<B>>;
}

/// What of a model's weights stays as its file has it on a device. The loader of a form decides by the
/// same functions.
#[derive(Clone, Copy, Debug)]
pub struct WeightPolicy {
    keeps: fn(&QuantWeights<'_>) -> bool,
    keeps_experts: fn(&ExpertSource<'_>) -> bool,
    dequantized_dtype: SrcDtype,
}

impl WeightPolicy {
    /// That of the form `W` on the backend `B`.
    pub fn of<B: Backend, W: WeightForm<B>>() -> Self {
        Self {
            keeps: W::keeps,
            keeps_experts: W::keeps_experts,
            dequantized_dtype: B::DEQUANTIZED_DTYPE,
        }
    }

    /// That of a device which computes on floats alone.
    pub fn floats() -> Self {
        Self {
            keeps: are_floats,
            keeps_experts: experts_are_floats,
            dequantized_dtype: SrcDtype::F32,
        }
    }

    /// Whether a matrix stays as it is.
    pub fn keeps(&self, weights: &QuantWeights<'_>) -> bool {
        (self.keeps)(weights)
    }

    /// The type that other weights are dequantised to.
    pub fn dequantized_dtype(&self) -> SrcDtype {
        self.dequantized_dtype
    }

    /// Whether the experts of a stack stay as they are.
    pub fn keeps_experts(&self, source: &ExpertSource<'_>) -> bool {
        (self.keeps_experts)(source)
    }
}

fn are_floats(weights: &QuantWeights<'_>) -> bool {
    weights.as_dense().is_some()
}

pub(crate) fn experts_are_floats(source: &ExpertSource<'_>) -> bool {
    match source {
        ExpertSource::Stack(part) => are_floats(&QuantWeights::Gguf(*part)),
        ExpertSource::Each(all) => all.iter().all(are_floats),
        ExpertSource::Reordered(stack) => are_floats(&stack.format()),
    }
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

        fn keeps_experts(_: &ExpertSource<'_>) -> bool {
            false
        }

        fn load_stack(_: &$b, _: &ExpertSource<'_>, _: ExpertShape) -> Result<Infallible> {
            Err(no_experts::<$b>())
        }

        fn split_stack_sums(stack: &mut Infallible, _: SumSplit) {
            match *stack {}
        }

        fn experts(
            stacks: ExpertStacks<$b, Infallible>,
            _: &MoeSpec,
            _: ExpertSums<$b>,
        ) -> Box<dyn Experts<$b>> {
            match stacks.gate.matrices {}
        }

        fn per_head_linear(stack: Infallible, _: ExpertShape) -> Box<dyn PerHeadLinear<$b>> {
            match stack {}
        }
    };
}

/// Floats as they are in the file, all else dequantised to [`Backend::DEQUANTIZED_DTYPE`]: for every backend.
#[derive(Clone, Copy, Debug)]
pub struct Dequantized;

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

impl<B: LlmBackend> WeightForm<B> for Dequantized {
    type Matrix = B::Weight;
    without_experts!(B);

    fn keeps(weights: &QuantWeights<'_>) -> bool {
        are_floats(weights)
    }

    fn load(
        device: &B,
        parts: &[QuantWeights<'_>],
        cols: usize,
        for_use: MatrixUse,
    ) -> Result<B::Weight> {
        let floats = parts.iter().map(|part| Prepared::floats::<B>(part, cols));
        let floats = floats.collect::<Result<Vec<_>>>()?;
        let parts = floats.iter().map(|part| float_part(&part.weights()));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        match for_use {
            MatrixUse::Products => device.from_weight_parts(&parts, cols),
            MatrixUse::LookUps => device.from_table_parts(&parts, cols),
        }
    }

    fn split_sums(matrix: &mut B::Weight, split: SumSplit) {
        B::split_sums(matrix, split);
    }

    fn gemm<T: FloatElement>(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &B::Weight,
        out: &mut B::Buffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        B::gemm(ctx, x, matrix, out, shape)
    }

    fn gemm_gated(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &B::Weight,
        activation: Activation,
        to: (&mut Act<B>, &mut Act<B>),
        shape: GemmShape,
    ) -> Result<()> {
        B::gemm_gated(ctx, x, matrix, activation, to, shape)
    }

    fn lookup(
        ctx: &mut B::Context,
        table: &B::Weight,
        ids: &B::Buffer<i32>,
        out: &mut Residual<B>,
        shape: RowShape,
    ) -> Result<()> {
        B::embedding_lookup(ctx, table, ids, out, shape)
    }
}

impl<B: QuantLlmBackend> WeightForm<B> for Native {
    type Matrix = NativeMatrix<B>;
    without_experts!(B);

    fn keeps(weights: &QuantWeights<'_>) -> bool {
        match weights {
            _ if are_floats(weights) => true,
            QuantWeights::Gguf(part) => B::is_native(part.ty),
            layer => B::is_native_layer(layer),
        }
    }

    fn load(
        device: &B,
        parts: &[QuantWeights<'_>],
        cols: usize,
        for_use: MatrixUse,
    ) -> Result<NativeMatrix<B>> {
        let keeps = <Self as WeightForm<B>>::keeps;
        let prepared = parts
            .iter()
            .map(|part| Prepared::new(part, cols, (keeps(part), B::DEQUANTIZED_DTYPE)));
        let prepared = prepared.collect::<Result<Vec<_>>>()?;
        let parts: Vec<_> = prepared.iter().map(Prepared::weights).collect();
        let blocks: Option<Vec<GgufRows<'_>>> = parts
            .iter()
            .map(|part| match part {
                QuantWeights::Gguf(part) => Some(*part),
                _ => None,
            })
            .collect();
        match blocks {
            _ if parts.iter().all(are_floats) => {
                Dequantized::load(device, &parts, cols, for_use).map(NativeMatrix::Dense)
            }
            Some(blocks) => device
                .load_quant_fused(&blocks, cols)
                .map(NativeMatrix::Blocks),
            None => device
                .load_layers_fused(&parts, cols)
                .map(NativeMatrix::Layers),
        }
    }

    fn split_sums(matrix: &mut NativeMatrix<B>, split: SumSplit) {
        match matrix {
            NativeMatrix::Dense(weight) => B::split_sums(weight, split),
            NativeMatrix::Blocks(weight) => B::split_quant_sums(weight, split),
            NativeMatrix::Layers(weight) => B::split_layer_sums(weight, split),
        }
    }

    fn gemm<T: FloatElement>(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &NativeMatrix<B>,
        out: &mut B::Buffer<T>,
        shape: GemmShape,
    ) -> Result<()> {
        match matrix {
            NativeMatrix::Dense(weight) => B::gemm(ctx, x, weight, out, shape),
            NativeMatrix::Blocks(weight) => B::gemm_quant(ctx, x, weight, out, shape),
            NativeMatrix::Layers(weight) => B::gemm_gptq(ctx, x, weight, out, shape),
        }
    }

    fn gemm_gated(
        ctx: &mut B::Context,
        x: &Act<B>,
        matrix: &NativeMatrix<B>,
        activation: Activation,
        to: (&mut Act<B>, &mut Act<B>),
        shape: GemmShape,
    ) -> Result<()> {
        match matrix {
            NativeMatrix::Dense(weight) => B::gemm_gated(ctx, x, weight, activation, to, shape),
            NativeMatrix::Blocks(weight) => {
                B::gemm_quant_gated(ctx, x, weight, activation, to, shape)
            }
            NativeMatrix::Layers(weight) => {
                B::gemm_gptq_gated(ctx, x, weight, activation, to, shape)
            }
        }
    }

    fn lookup(
        ctx: &mut B::Context,
        table: &NativeMatrix<B>,
        ids: &B::Buffer<i32>,
        out: &mut Residual<B>,
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

/// A weight as it goes to a device.
pub(crate) enum Prepared<'a> {
    /// As its file has it.
    Kept(QuantWeights<'a>),
    /// In f32: numbers and rows.
    Dequantized(Vec<f32>, usize),
    /// In 16 bits: their bits, of what, and rows.
    Rounded(Vec<u16>, GgufQuantType, usize),
}

impl<'a> Prepared<'a> {
    /// A weight with rows of `cols` numbers, which stays as it is if `keep`, and is dequantised to floats of a type if not.
    /// Nothing else above the backends dequantises weights.
    pub(crate) fn new(
        weights: &QuantWeights<'a>,
        cols: usize,
        (keep, dequantized): (bool, SrcDtype),
    ) -> Result<Self> {
        if keep {
            return Ok(Self::Kept(*weights));
        }
        let (values, rows) = (weights.dequantize("load_weights", cols)?, weights.rows());
        let bits = |round: fn(f32) -> u16| values.iter().map(|&x| round(x)).collect();
        Ok(match dequantized {
            SrcDtype::BF16 => {
                let bits = bits(|x| bf16::from_f32(x).to_bits());
                Self::Rounded(bits, GgufQuantType::BF16, rows)
            }
            SrcDtype::F16 => {
                let bits = bits(|x| f16::from_f32(x).to_bits());
                Self::Rounded(bits, GgufQuantType::F16, rows)
            }
            SrcDtype::F32 => Self::Dequantized(values, rows),
        })
    }

    /// Floats as they are, the rest as the backend has it dequantised.
    pub(crate) fn floats<B: Backend>(weights: &QuantWeights<'a>, cols: usize) -> Result<Self> {
        Self::new(weights, cols, (are_floats(weights), B::DEQUANTIZED_DTYPE))
    }

    /// Floats of 32 bits rounded to bf16, the rest as it is.
    pub(crate) fn rounded(weights: &QuantWeights<'a>, cols: usize) -> Result<Self> {
        let wide = weights
            .as_dense()
            .is_some_and(|part| part.dtype == SrcDtype::F32);
        Self::new(weights, cols, (!wide, SrcDtype::BF16))
    }

    /// The weight, dequantised or not.
    pub(crate) fn weights(&self) -> QuantWeights<'_> {
        match self {
            Self::Kept(weights) => *weights,
            Self::Dequantized(values, rows) => QuantWeights::Gguf(GgufRows::new(
                bytemuck::cast_slice(values),
                GgufQuantType::F32,
                *rows,
            )),
            Self::Rounded(bits, ty, rows) => {
                QuantWeights::Gguf(GgufRows::new(bytemuck::cast_slice(bits), *ty, *rows))
            }
        }
    }
}

/// Floats as every backend loads them.
///
/// # Errors
/// `InvalidArgument` for a weight that is none: [`Prepared::floats`] makes some of it.
pub(crate) fn float_part<'a>(weights: &QuantWeights<'a>) -> Result<WeightPart<'a>> {
    weights.as_dense().ok_or_else(|| {
        let reason = format!("found {}, expected floats", weights.label());
        Error::invalid("load_weights", reason)
    })
}
