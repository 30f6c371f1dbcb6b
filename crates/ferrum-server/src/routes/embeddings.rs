//! `/v1/embeddings`: a vector for each text, of the states that the model has when it has read it; and what vLLM
//! makes of such vectors.

use super::completions::read_prompts;
use super::messages;
use crate::answers::{Answers, Next};
use crate::app::{App, fresh_id};
use crate::error::ApiError;
use crate::model::unix_time;
use crate::models::Lease;
use crate::request::{self, Body, Limit, Prompts};
use crate::response::{
    Embedding, EmbeddingList, EmbeddingObject, ListObject, PairScore, Pooling, PoolingList,
    PoolingObject, PromptUsage, ScoreList, ScoreObject,
};
use crate::sampling::{Place, Truncation, within};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ferrum_engine::{Generation, engine};
use ferrum_types::TokenId;
use serde_json::value::RawValue;
use std::sync::Arc;

/// Texts that are with the engine at a time, so that one request does not fill its queue.
const AT_A_TIME: usize = 64;

/// What becomes vectors, with the field that it is in.
enum Input {
    Texts(&'static str, Prompts),
    /// The tokens of a conversation.
    Messages(Vec<TokenId>),
}

/// Texts that become vectors.
#[derive(Debug)]
struct Texts {
    place: Place,
    pooling: engine::Pooling,
    tokens: Vec<Vec<TokenId>>,
}

impl Texts {
    fn read(
        app: &App,
        lease: &Lease,
        body: &mut Body,
        truncation: Option<Limit>,
        inputs: impl IntoIterator<Item = Input>,
    ) -> Result<Self, ApiError> {
        let truncation = Truncation::of(truncation)?;
        let place = Place::read(body, lease)?;
        let Some(pooling) = lease.served.pooling else {
            let reason = "its files ask for a pooling that is not known here";
            return Err(ApiError::unsupported("model", reason));
        };
        let mut tokens = Vec::new();
        for input in inputs {
            match input {
                Input::Texts(param, prompts) => {
                    let texts = read_prompts(lease, param, prompts, app.config.max_inputs)?;
                    tokens.extend(texts.into_iter().map(|text| text.tokens));
                }
                Input::Messages(read) => tokens.push(read),
            }
        }
        for text in &mut tokens {
            truncation.apply(text, lease, 0);
        }
        Ok(Self {
            place,
            pooling,
            tokens,
        })
    }

    /// Has the engine read all texts, and gives `each` their states with their number. The tokens that it took.
    async fn states(
        &self,
        app: &App,
        lease: &Lease,
        param: &str,
        mut each: impl FnMut(usize, Vec<f32>) -> Result<(), ApiError>,
    ) -> Result<usize, ApiError> {
        let mut tokens = 0;
        for (part, texts) in self.tokens.chunks(AT_A_TIME).enumerate() {
            let asked = texts.iter().map(|text| ferrum_engine::Request {
                pooling: Some(self.pooling),
                ..self
                    .place
                    .request(text.clone(), Generation::default(), &app.config)
            });
            let mut answers = Answers::begin(lease, param, 1, asked)?;
            while let Some(next) = answers.next().await {
                match next {
                    Next::Failed(error) => return Err(error),
                    Next::Done(usage) => tokens += usage.prompt_tokens,
                    Next::Embedding(index, states) => each(part * AT_A_TIME + index, states)?,
                    Next::Prompt(..) | Next::Piece(_) => {}
                }
            }
        }
        Ok(tokens)
    }
}

#[derive(Debug)]
struct Job {
    texts: Texts,
    dimensions: usize,
    base64: bool,
}

/// `/v1/embeddings`.
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (job, lease) = app.read(request, read).await?;
    let (vectors, tokens) = vectors(&app, &lease, &job).await?;
    let entry = |(index, embedding)| Embedding {
        object: EmbeddingObject,
        index,
        embedding,
    };
    Ok(Json(EmbeddingList {
        object: ListObject,
        data: vectors.into_iter().enumerate().map(entry).collect(),
        model: &job.texts.place.model.name,
        usage: PromptUsage::of(tokens),
    })
    .into_response())
}

/// `/pooling`, which vLLM has for the same vectors.
pub(crate) async fn pooling(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (job, lease) = app.read(request, read).await?;
    let (vectors, tokens) = vectors(&app, &lease, &job).await?;
    let entry = |(index, data)| Pooling {
        object: PoolingObject,
        index,
        data,
    };
    Ok(Json(PoolingList {
        object: ListObject,
        data: vectors.into_iter().enumerate().map(entry).collect(),
        model: &job.texts.place.model.name,
        usage: PromptUsage::of(tokens),
    })
    .into_response())
}

/// The vectors as JSON text, and the tokens that they took: as numbers of JSON they would take many times their length.
async fn vectors(
    app: &App,
    lease: &Lease,
    job: &Job,
) -> Result<(Vec<Box<RawValue>>, usize), ApiError> {
    let mut vectors = vec![Box::<RawValue>::default(); job.texts.tokens.len()];
    let each = |index: usize, states| {
        vectors[index] = written(states, job)?;
        Ok(())
    };
    let tokens = job.texts.states(app, lease, "input", each).await?;
    Ok((vectors, tokens))
}

/// `/v1/score`: how alike texts are, by the cosine of their vectors.
pub(crate) async fn score(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let ((texts, first), lease) = app.read(request, read_score).await?;
    let mut vectors = vec![Vec::new(); texts.tokens.len()];
    let each = |index: usize, states: Vec<f32>| {
        vectors[index] = unit(states)?;
        Ok(())
    };
    let tokens = texts.states(&app, &lease, "text_1", each).await?;
    let (left, right) = vectors.split_at(first);
    // One text is held against each of the others.
    let pairs = right.iter().zip(left.iter().cycle());
    let scores = pairs.enumerate().map(|(index, (right, left))| {
        let products = left
            .iter()
            .zip(right)
            .map(|(a, b)| f64::from(*a) * f64::from(*b));
        PairScore {
            index,
            object: ScoreObject,
            score: products.sum(),
        }
    });
    Ok(Json(ScoreList {
        id: fresh_id("score-"),
        object: ListObject,
        created: unix_time(),
        model: &texts.place.model.name,
        data: scores.collect(),
        usage: PromptUsage::of(tokens),
    })
    .into_response())
}

/// The texts, and how many of them are on the left.
fn read_score(app: &App, lease: &Lease, body: &mut Body) -> Result<(Texts, usize), ApiError> {
    let fields: request::Score = body.part()?;
    let (left, right) = (fields.text_1.list.len(), fields.text_2.list.len());
    if left != 1 && left != right {
        let reason = format!("found {left} texts and {right} in text_2, expected one or as many");
        return Err(ApiError::invalid("text_1", reason));
    }
    let inputs = [("text_1", fields.text_1), ("text_2", fields.text_2)];
    let inputs = inputs.map(|(param, texts)| Input::Texts(param, texts));
    let truncation = fields.truncate_prompt_tokens;
    Ok((Texts::read(app, lease, body, truncation, inputs)?, left))
}

fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<Job, ApiError> {
    let fields: request::Embeddings = body.part()?;
    let most = lease.served.hidden_size;
    let dimensions = match fields.dimensions {
        Some(found) => within("dimensions", found.0, 1..=most)?,
        None => most,
    };
    let base64 = match fields.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let reason = format!("found {other:?}, expected \"float\" or \"base64\"");
            return Err(ApiError::invalid("encoding_format", reason));
        }
    };
    let input = match (fields.input, messages::read(body)?) {
        (Some(_), Some(_)) => {
            let reason = "there is an input, too; expected one of them";
            return Err(ApiError::invalid("messages", reason));
        }
        (None, None) => return Err(ApiError::invalid("input", "it is missing")),
        (Some(texts), None) => Input::Texts("input", texts),
        (None, Some(conversation)) => {
            let begin = fields.add_generation_prompt.unwrap_or(false);
            let add = fields.add_special_tokens.unwrap_or(false);
            Input::Messages(messages::tokens(lease, conversation, begin, add)?)
        }
    };
    Ok(Job {
        texts: Texts::read(app, lease, body, fields.truncate_prompt_tokens, [input])?,
        dimensions,
        base64,
    })
}

/// States at length 1; a zero stays one.
fn unit(mut states: Vec<f32>) -> Result<Vec<f32>, ApiError> {
    let squares: f64 = states.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let length = squares.sqrt();
    if !length.is_finite() {
        return Err(ApiError::internal("the model's states are not finite"));
    }
    if length > 0.0 {
        for x in &mut states {
            *x = (f64::from(*x) / length) as f32;
        }
    }
    Ok(states)
}

/// The first dimensions at length 1, as JSON.
fn written(mut states: Vec<f32>, job: &Job) -> Result<Box<RawValue>, ApiError> {
    states.truncate(job.dimensions);
    let states = unit(states)?;
    let text = match job.base64 {
        true => {
            let bytes: Vec<u8> = states.iter().flat_map(|x| x.to_le_bytes()).collect();
            format!("\"{}\"", BASE64_STANDARD.encode(bytes))
        }
        false => {
            let numbers: Vec<_> = states.iter().map(f32::to_string).collect();
            format!("[{}]", numbers.join(","))
        }
    };
    RawValue::from_string(text).map_err(|e| ApiError::internal(e.to_string()))
}
