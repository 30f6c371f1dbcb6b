//! Types shared by all Ferrum crates: errors, dtypes, buffer elements, shapes and ids.
//!
//! This crate sits at the bottom of the tree. It knows nothing of files, kernels or models; what
//! belongs here is only what two crates on different branches of the tree must agree on.

pub mod check;
mod dtype;
mod element;
mod error;
mod gguf_type;
mod ids;
mod kv;
mod shapes;
mod size;
mod sum_split;
mod weight_part;

pub use dtype::{Dtype, SrcDtype};
pub use element::{Element, FloatElement};
pub use error::{Error, Result};
pub use gguf_type::GgufQuantType;
pub use ids::{AdapterId, BlockId, SeqId, StateSlot, TokenId};
pub use kv::{KvBf16, KvBlockBytes, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8, PagedKvShape};
pub use shapes::{
    Activation, AttnConfig, BatchShape, CacheSpan, CausalConvShape, Conv1dShape, CopyColumnsShape,
    DeviceMemory, ExpertActivation, ExpertGroups, ExpertInput, ExpertScore, ExpertShape,
    FlashShape, GeluKind, GemmShape, GroupScore, HeadLayout, HeadOrder, HeadsShape,
    LinearAttentionRule, LinearAttentionShape, MatShape, MlaShape, MoeShape, NormShape, PatchShape,
    QkvShape, RopeStyle, RouteShape, RowShape, StateShape,
};
pub use sum_split::SumSplit;
pub use weight_part::WeightPart;
