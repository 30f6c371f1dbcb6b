//! `/tokenize`, `/detokenize` and `/apply-template`.

use serde::Serialize;
use utoipa::ToSchema;

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
