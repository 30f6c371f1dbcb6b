//! Embeddings, scores and tokens.

use super::ListObject;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

literals! {
    EmbeddingObject = "embedding";
    PoolingObject = "pooling";
    ScoreObject = "score";
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

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ScoreList<'a> {
    pub(crate) id: String,
    #[schema(inline)]
    pub(crate) object: ListObject,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) data: Vec<PairScore>,
    pub(crate) usage: PromptUsage,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PairScore {
    pub(crate) index: usize,
    #[schema(inline)]
    pub(crate) object: ScoreObject,
    pub(crate) score: f64,
}

/// Documents by how well they answer a query, the best first.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RerankList<'a> {
    pub(crate) id: String,
    pub(crate) model: &'a str,
    pub(crate) usage: PromptUsage,
    pub(crate) results: Vec<RankedDocument>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RankedDocument {
    /// Its place in the request.
    pub(crate) index: usize,
    /// With `return_documents`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) document: Option<RerankedText>,
    pub(crate) relevance_score: f64,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RerankedText {
    pub(crate) text: String,
}

/// Tokens of a text or a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Tokenized {
    pub(crate) count: usize,
    pub(crate) max_model_len: usize,
    pub(crate) tokens: Vec<ListedToken>,
    /// Null where they were not asked for.
    #[schema(required)]
    pub(crate) token_strs: Option<Vec<String>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ListedToken {
    Id(u32),
    /// With `with_pieces`.
    Piece {
        id: u32,
        piece: TokenPiece,
    },
}

/// The text of a token, or its bytes if it is no text by itself.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum TokenPiece {
    Text(String),
    Bytes(Vec<u8>),
}

/// Text of tokens under vLLM's name, and under llama.cpp's.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Detokenized {
    pub(crate) prompt: String,
    pub(crate) content: String,
}

/// What a chat template makes of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Templated {
    pub(crate) prompt: String,
}
