//! `/v1/score` and `/v1/rerank`: how alike texts are, or how well documents answer a query.
//!
//! A cross-encoder reads both texts together and says so itself; of other models it is the cosine of their vectors.

use super::embeddings::unit;
use super::texts::{EncoderLease, Input, Texts, compute, fitting};
use crate::error::ApiError;
use crate::generation::options::check_range;
use crate::generation::request_context::RequestContext;
use crate::generation::truncation::Truncation;
use crate::http::app::App;
use crate::ids::fresh_id;
use crate::ids::unix_time;
use crate::models::AnyLease;
use crate::request::{self, Body, Limit, Prompt, Prompts};
use crate::response::{
    ListObject, PairScore, PromptUsage, RankedDocument, RerankList, RerankedText, ScoreList,
    ScoreObject,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use ferrum_engine::{Encoder, EncoderInput, EncoderWant};
use std::sync::Arc;

/// Pairs of texts that get scores.
#[derive(Debug)]
enum Pairs {
    /// By their vectors: the first texts are on the left, the others on the right.
    Cosine(Texts, usize),
    /// By a cross-encoder.
    Together(RequestContext, EncoderLease, Vec<EncoderInput>),
}

/// The two sides of pairs, each with its field: one text is compared with each of the others.
struct Sides {
    left: (&'static str, Prompts),
    right: (&'static str, Prompts),
}

impl Pairs {
    fn read(
        app: &App,
        lease: &AnyLease,
        body: &mut Body,
        truncation: Option<Limit>,
        sides: Sides,
    ) -> Result<Self, ApiError> {
        let Sides { left, right } = sides;
        let count = left.1.list.len();
        let encoder = match lease {
            AnyLease::Encoder(lease) if lease.labels > 0 => lease,
            _ => {
                let inputs = [left, right].map(|(param, texts)| Input::Texts(param, texts));
                let texts = Texts::read(app, lease, body, truncation, inputs)?;
                return Ok(Self::Cosine(texts, count));
            }
        };
        if encoder.labels > 1 {
            let reason = format!(
                "it gives {} scores to a pair of texts, a reranker gives one",
                encoder.labels
            );
            return Err(ApiError::unsupported("model", reason));
        }
        let truncation = Truncation::of(truncation)?;
        let context = RequestContext::read(body, encoder)?;
        super::completions::count_prompts(right.0, right.1.list.len(), app.config.max_inputs)?;
        let param = right.0;
        let (first, second) = (texts(left)?, texts(right)?);
        let tokenizer = &encoder.tokenizer;
        let room = truncation.room(tokenizer);
        let pairs = second.iter().zip(first.iter().cycle());
        let inputs = pairs.map(|(second, first)| {
            let pair = tokenizer.pair(first, second, room);
            let pair = pair.map_err(|e| ApiError::malformed(e.to_string()))?;
            fitting(pair, param, (truncation, tokenizer))
        });
        let inputs = inputs.collect::<Result<_, _>>()?;
        Ok(Self::Together(context, encoder.clone(), inputs))
    }

    /// What the request calls the model.
    fn model(&self) -> &str {
        let context = match self {
            Self::Cosine(texts, _) => &texts.context,
            Self::Together(context, ..) => context,
        };
        &context.model.name
    }

    /// The score of each pair, and the tokens that it took.
    async fn scores(&self, app: &App, param: &str) -> Result<(Vec<f64>, usize), ApiError> {
        match self {
            Self::Cosine(texts, first) => {
                let mut vectors = vec![Vec::new(); texts.count()];
                let each = |index: usize, states: Vec<f32>| {
                    vectors[index] = unit(states)?;
                    Ok(())
                };
                let tokens = texts.states(app, param, each).await?;
                let (left, right) = vectors.split_at(*first);
                let pairs = right.iter().zip(left.iter().cycle());
                let scores = pairs.map(|(right, left)| {
                    let products = left.iter().zip(right);
                    products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                });
                Ok((scores.collect(), tokens))
            }
            Self::Together(context, lease, inputs) => {
                let mut scores = vec![0.0; inputs.len()];
                let each = |index: usize, logits: Vec<f32>| {
                    let logit = logits.first().copied().unwrap_or(f32::NAN);
                    if !logit.is_finite() {
                        return Err(ApiError::internal("the model's score is not finite"));
                    }
                    scores[index] = f64::from(Encoder::score(logit));
                    Ok(())
                };
                let work = (&inputs[..], EncoderWant::Logits);
                let tokens = compute(app, (lease, context), param, work, each).await?;
                Ok((scores, tokens))
            }
        }
    }
}

/// The texts of a side of pairs, which tokens are not: what is between the texts of a pair is the tokenizer's.
fn texts((param, prompts): (&'static str, Prompts)) -> Result<Vec<String>, ApiError> {
    let text = |prompt| match prompt {
        Prompt::Text(text) => Ok(text),
        Prompt::Tokens(_) => {
            let reason = "found tokens, expected texts: the model reads pairs of them";
            Err(ApiError::unsupported(param, reason))
        }
    };
    prompts.list.into_iter().map(text).collect()
}

/// `/v1/score`.
pub(crate) async fn score(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let pairs = app.read_any(request, read_score).await?;
    let (scores, tokens) = pairs.scores(&app, "text_1").await?;
    let scored = scores.into_iter().enumerate();
    let scored = scored.map(|(index, score)| PairScore {
        index,
        object: ScoreObject,
        score,
    });
    Ok(Json(ScoreList {
        id: fresh_id("score-"),
        object: ListObject,
        created: unix_time(),
        model: pairs.model(),
        data: scored.collect(),
        usage: PromptUsage::of(tokens),
    })
    .into_response())
}

fn read_score(app: &App, lease: &AnyLease, body: &mut Body) -> Result<Pairs, ApiError> {
    let fields: request::Score = body.part()?;
    let (left, right) = (fields.text_1.list.len(), fields.text_2.list.len());
    if left != 1 && left != right {
        let reason = format!("found {left} texts and {right} in text_2, expected one or as many");
        return Err(ApiError::invalid("text_1", reason));
    }
    let sides = Sides {
        left: ("text_1", fields.text_1),
        right: ("text_2", fields.text_2),
    };
    Pairs::read(app, lease, body, fields.truncate_prompt_tokens, sides)
}

/// A query with its documents.
#[derive(Debug)]
struct Ranking {
    pairs: Pairs,
    documents: usize,
    top_n: usize,
    /// The documents, if they are to be returned.
    texts: Option<Vec<String>>,
}

/// `/v1/rerank`, as Cohere, Jina and vLLM have it.
pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut ranking = app.read_any(request, read_rerank).await?;
    let (scores, tokens) = ranking.pairs.scores(&app, "documents").await?;
    let mut order: Vec<usize> = (0..ranking.documents).collect();
    // Equal ones stay as they came.
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(ranking.top_n);
    let results = order.into_iter().map(|index| RankedDocument {
        index,
        document: ranking.texts.as_mut().map(|texts| RerankedText {
            text: std::mem::take(&mut texts[index]),
        }),
        relevance_score: scores[index],
    });
    let results = results.collect();
    Ok(Json(RerankList {
        id: fresh_id("rerank-"),
        model: ranking.pairs.model(),
        usage: PromptUsage::of(tokens),
        results,
    })
    .into_response())
}

fn read_rerank(app: &App, lease: &AnyLease, body: &mut Body) -> Result<Ranking, ApiError> {
    let fields: request::Rerank = body.part()?;
    let documents: Vec<_> = fields.documents.into_iter().map(|one| one.0).collect();
    let count = documents.len();
    if count == 0 || count > app.config.max_inputs {
        let most = app.config.max_inputs;
        let reason = format!("found {count} documents, expected 1 to {most}");
        return Err(ApiError::invalid("documents", reason));
    }
    let top_n = match fields.top_n {
        Some(n) => check_range("top_n", n.0, 1..=usize::MAX)?,
        None => count,
    };
    let texts = fields.return_documents.unwrap_or(false);
    let texts = texts.then(|| documents.clone());
    let sides = Sides {
        left: (
            "query",
            Prompts {
                list: vec![Prompt::Text(fields.query)],
                listed: false,
            },
        ),
        right: (
            "documents",
            Prompts {
                list: documents.into_iter().map(Prompt::Text).collect(),
                listed: true,
            },
        ),
    };
    // Those who have this route cut off what is too long; vLLM's field says where.
    let truncation = fields.truncate_prompt_tokens.or(Some(request::Int(-1)));
    Ok(Ranking {
        pairs: Pairs::read(app, lease, body, truncation, sides)?,
        documents: count,
        top_n,
        texts,
    })
}
