//! The contract between the forward path and a device.
//!
//! The forward path is written once against these traits. A backend implements [`Backend`] and those
//! capability traits that its device is able to fulfil; a capability that it lacks is simply not
//! implemented, so asking for it does not compile. What is only known at run time (a block size, a
//! dtype in a file) is answered by [`ferrum_types::Error::Unsupported`], never by a wrong result.
//!
//! Four conventions hold for every op:
//!
//! * **Time.** An op *records* work on a context; it may run at once (CPU) or when the context is next
//!   synchronised or read from (GPU). Results are seen by the host only through [`Backend::read`].
//! * **Shapes.** Activations are row-major with tokens outermost unless an op says *head-major*
//!   (`[heads, tokens, head_dim]`). A buffer may be longer than the shape asks for; a shorter one is
//!   [`ferrum_types::Error::Shape`].
//! * **Precision.** Elements go by role: [`Act`], [`Residual`] and [`Logits`] may differ, so that a device computes
//!   on 16-bit activations and still sums layers and ranks tokens in f32. An op whose buffer may have several
//!   roles is generic over its element; it is called with the elements of these roles, and f32 as parameters have it.
//!   Whatever they are, an op computes in at least f32 and rounds what it writes once.
//! * **Order.** The result of a row depends on that row alone: reductions have a fixed order that does
//!   not change with the number of rows, the position of a chunk or the size of a KV block.
//!   A device for which that is too dear says so ([`Backend::batch_invariance`]).

pub mod check;
mod collective;
pub(crate) mod compose;
mod core;
mod graph;
mod heads;
mod host;
mod kv;
mod linear_attention;
mod moe;
mod paged;
mod pending;
mod quant;
mod sample;
mod state;
#[cfg(test)]
mod tests;
mod timer;

pub(crate) use self::collective::host as host_collectives;
pub(crate) use self::collective::join_once;
pub use self::collective::{
    BackendCollective, GroupCall, GroupHandle, GroupTransport, LocalGroup, ParallelNorm, ReduceOp,
};
pub use self::core::{
    Act, Backend, BatchInvariance, DeviceBuffer, DeviceInfo, Logits, Residual, UploadPiece,
};
pub use self::graph::{BackendGraph, GraphKey, GraphRun};
pub use self::heads::{QkNorm, QkvTransform, Rope};
pub use self::host::{HostBuffer, HostMemory};
pub use self::kv::{KvCache, KvCacheQuant, KvLayer};
pub use self::moe::{BackendMoeFused, ExpertProjection, MoeRouting};
pub use self::paged::{BackendInt8KvOps, BackendKvDtype, BackendPagedKv, DeviceBatch, PagedQkv};
pub use self::pending::{FinishRead, PendingRead};
pub use self::quant::{
    AwqWeights, BackendMarlinExperts, BackendQuantExperts, BackendQuantGguf, BackendQuantMarlin,
    Fp8Weights, GgufRows, GptqWeights, GptqZeroPoints, PackQuantizedWeights, PackedZeros,
    QuantKind, QuantWeights,
};
pub use self::sample::{
    BackendSample, DeviceSampling, LogitAdjustment, Logprobs, MAX_LOGPROBS, NoToken, RowSampling,
    SampleBatch, SampleShape, Sampled, TokenLogprob,
};
pub use self::state::{BackendState, LinearAttention};
pub use self::timer::{BackendTimer, HostTimer, Span, chrome_trace};
pub use ferrum_types::{
    Activation, AttnConfig, BatchShape, CacheSpan, CausalConvShape, Conv1dShape, CopyColumnsShape,
    DeviceMemory, ExpertActivation, ExpertGroups, ExpertInput, ExpertScore, ExpertShape,
    FlashShape, GeluKind, GemmShape, GroupScore, HeadLayout, HeadOrder, HeadsShape, KvBf16,
    KvBlockBytes, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8, LinearAttentionRule,
    LinearAttentionShape, MatShape, MlaShape, MoeShape, NormShape, PagedKvShape, PatchShape,
    QkvShape, RopeStyle, RouteShape, RowShape, StateShape, SumSplit, WeightPart,
};

/// What a dense decoder needs: core ops, paged KV in f32, recurrent states, graphs, sampling and collectives.
pub trait LlmBackend:
    Backend
    + BackendPagedKv
    + BackendKvDtype<KvF32>
    + BackendState
    + BackendGraph
    + BackendSample
    + BackendCollective
{
}
impl<B> LlmBackend for B where
    B: Backend
        + BackendPagedKv
        + BackendKvDtype<KvF32>
        + BackendState
        + BackendGraph
        + BackendSample
        + BackendCollective
{
}

/// An [`LlmBackend`] that computes on quantised weights without dequantising them.
pub trait QuantLlmBackend: LlmBackend + BackendQuantGguf + BackendQuantMarlin {}
impl<B> QuantLlmBackend for B where B: LlmBackend + BackendQuantGguf + BackendQuantMarlin {}

/// A [`QuantLlmBackend`] that computes on quantised stacks of experts of every kind of file.
pub trait MoeLlmBackend: QuantLlmBackend + BackendQuantExperts + BackendMarlinExperts {}
impl<B> MoeLlmBackend for B where B: QuantLlmBackend + BackendQuantExperts + BackendMarlinExperts {}
