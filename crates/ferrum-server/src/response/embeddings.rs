//! `/v1/embeddings` and `/pooling`.

use super::ListObject;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

literals! {
    EmbeddingObject = "embedding";
    PoolingObject = "pooling";
}

/// Vectors, in the order of their texts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingList<'a> {
    #[schema(inline)]
    pub(crate) object: ListObject,
    pub(crate) data: Vec<Embedding>,
    pub(crate) model: &'a str,
    pub(crate) usage: PromptUsage,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Embedding {
    #[schema(inline)]
    pub(crate) object: EmbeddingObject,
    pub(crate) index: usize,
    #[schema(value_type = EmbeddingVector)]
    pub(crate) embedding: Box<RawValue>,
}

/// The same vectors, as vLLM has them.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PoolingList<'a> {
    #[schema(inline)]
    pub(crate) object: ListObject,
    pub(crate) data: Vec<Pooling>,
    pub(crate) model: &'a str,
    pub(crate) usage: PromptUsage,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Pooling {
    #[schema(inline)]
    pub(crate) object: PoolingObject,
    pub(crate) index: usize,
    #[schema(value_type = EmbeddingVector)]
    pub(crate) data: Box<RawValue>,
}

/// What a vector is; routes have it as JSON text, which is written where the vector comes.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "its schema is what is needed")]
pub(crate) enum EmbeddingVector {
    Numbers(Vec<f32>),
    /// Numbers of four bytes, the least significant first, in base64.
    Base64(String),
}

/// Tokens that texts took.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PromptUsage {
    pub(crate) prompt_tokens: usize,
    pub(crate) total_tokens: usize,
}

impl PromptUsage {
    pub(crate) fn of(tokens: usize) -> Self {
        Self {
            prompt_tokens: tokens,
            total_tokens: tokens,
        }
    }
}
