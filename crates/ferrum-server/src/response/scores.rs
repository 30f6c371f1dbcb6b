//! `/v1/score` and `/v1/rerank`.

use super::{ListObject, PromptUsage};
use serde::Serialize;
use utoipa::ToSchema;

literals! {
    ScoreObject = "score";
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
