//! Models: what a decoder is ([`DecoderSpec`]), how one step of it runs ([`DecoderRunner`]), and how the
//! families people use map onto that ([`families`]).
//!
//! There is one forward path. Prefill, a chunk of it, decode and any mix are the same code over a flat
//! ragged [`StepBatch`], generic over the backend; a [`ModelRunner`] is made for a KV element, which layers do
//! not see. A family is data: it maps a config and weight names onto a spec, and owns no forward pass.
//!
//! This crate knows nothing of scheduling, sampling or sockets.

mod batch;
mod cache;
mod checkpoint;
pub mod clip;
mod decode;
mod dense;
mod draft_head;
mod embedding_prompts;
pub mod encoder;
mod expert_relayout;
mod expert_weights;
mod experts;
pub mod families;
mod group;
mod images;
mod input_gather;
mod inventory;
mod kv_blocks;
mod kv_layer;
mod layer;
mod linear;
mod load;
mod lora;
mod model;
mod model_kind;
mod named;
mod plan;
mod pooling;
mod pre_norm;
mod profile;
mod progress;
pub mod quantize;
mod rank_index;
mod readback;
mod rope;
mod runner;
mod spec;
mod stored;
mod unused;
pub mod vision;
mod weight_shard;
mod weights;
pub mod whisper;

pub use batch::{
    AuxHiddenPoint, AuxHiddenState, BlockTables, FeatureSource, LogitRows, PendingToken, SeqStep,
    StateInit, StepBatch,
};
pub use cache::{CacheGroup, LayerCache, StateSlots, spanned_blocks};
pub use decode::{DecodeBackend, RunnerDecode};
pub use dense::DenseLayers;
pub use draft_head::{DraftFeatures, DraftHead, load_draft_head, read_eagle3, read_mtp};
pub use embedding_prompts::EmbeddingPrompts;
pub use expert_relayout::ReorderedExperts;
pub use expert_weights::{ExpertWeightForm, Moe};
pub use experts::{
    ExpertSource, ExpertStack, ExpertStacks, ExpertSums, Experts, MoeScratch, PerHeadLinear,
};
pub use families::{Family, family_for};
pub use group::{GroupAdapter, GroupAdapterLoader, RunnerGroup, follow, rank_runner};
pub use images::{ImageRows, ImageSpan, image_cut_by};
pub use inventory::{
    DecoderTensor, ExpertNames, ExpertNormNames, FusedExperts, FusedNames, GatheredProduct,
    HeadRows, InputBoundaries, LinearAttentionNames, MlaNames, PerLayerNames, ProductRows,
    RankShard, RowRuns, ShardAxis, ShardBoundaries, ShardUnit, SharedNames, StackLayout, Stage,
    TensorId, TensorLocation, TensorPart, TensorRole, TensorShape, TensorSlice, WeightNames,
};
pub use kv_blocks::{KvBlockLayout, KvBlockPart, StateLayout};
pub use linear::{Embedding, Linear, LogitLinear, MatrixLinear};
pub use load::{load_rank_weights, load_stage_weights, load_weights};
pub use lora::{AdapterLoader, LoadedAdapter};
pub use model::{Model, read_model};
pub use model_kind::ModelKind;
pub use named::WeightDtype;
pub use plan::{MemoryPlan, memory_plan, rank_memory_plan, stage_memory_plan};
pub use pooling::{Pooling, StatedPooling};
pub use pre_norm::{PreNormActivation, PreNormSpec};
pub use progress::LoadProgress;
pub use readback::{DeviceChoice, Readback, RowOutput, StepOutput, Ticket};
pub use rope::RopeTables;
pub use runner::{
    DecoderRunner, DecoderWeights, EarlierStage, GraphCounts, KvLayout, ModelRunner, RunnerConfig,
    SharedTables,
};
pub use spec::{
    Activation, AttentionSpec, CacheSpec, DecoderSpec, ExpertRouting, FeedForwardSpec, GqaSpec,
    LayerForm, LayerSpec, LinearAttentionSpec, MlaSpec, MlpSpec, MoeSpec, NormKind, PerLayerSpec,
    QkNormSpec, RopeScaling, RopeSpec, Scales, SharedExpertSpec, ShortConvSpec,
};
pub use weights::{Dequantized, Native, NativeMatrix, WeightForm, WeightPolicy};
