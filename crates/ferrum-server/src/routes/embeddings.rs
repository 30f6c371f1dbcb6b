//! `/v1/embeddings`: a vector for each text, of the states that the model has when it has read it; and the same in vLLM's
//! form.

use super::completions::count_prompts;
use super::openai_messages;
use super::texts::{Input, Texts};
use crate::error::ApiError;
use crate::generation::options::check_range;
use crate::http::app::App;
use crate::models::AnyLease;
use crate::request::{self, Body, Prompt, Prompts};
use crate::response::{
    Embedding, EmbeddingList, EmbeddingObject, ListObject, Pooling, PoolingList, PoolingObject,
    PromptUsage,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::value::RawValue;
use std::sync::Arc;

const PROMPT_NAME: &str = "prompt_name";

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
    let job = app.read_any(request, read).await?;
    let (vectors, tokens) = vectors(&app, &job).await?;
    let entry = |(index, embedding)| Embedding {
        object: EmbeddingObject,
        index,
        embedding,
    };
    Ok(Json(EmbeddingList {
        object: ListObject,
        data: vectors.into_iter().enumerate().map(entry).collect(),
        model: &job.texts.context.model.name,
        usage: PromptUsage::of(tokens),
    })
    .into_response())
}

/// `/pooling`, which vLLM has for the same vectors.
pub(crate) async fn pooling(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let job = app.read_any(request, read).await?;
    let (vectors, tokens) = vectors(&app, &job).await?;
    let entry = |(index, data)| Pooling {
        object: PoolingObject,
        index,
        data,
    };
    Ok(Json(PoolingList {
        object: ListObject,
        data: vectors.into_iter().enumerate().map(entry).collect(),
        model: &job.texts.context.model.name,
        usage: PromptUsage::of(tokens),
    })
    .into_response())
}

/// The vectors as JSON text, and the tokens that they took: as numbers of JSON they would take many times their length.
async fn vectors(app: &App, job: &Job) -> Result<(Vec<Box<RawValue>>, usize), ApiError> {
    let mut vectors = vec![Box::<RawValue>::default(); job.texts.count()];
    let each = |index: usize, states| {
        vectors[index] = written(states, job)?;
        Ok(())
    };
    let tokens = job.texts.states(app, "input", each).await?;
    Ok((vectors, tokens))
}

fn read(app: &App, lease: &AnyLease, body: &mut Body) -> Result<Job, ApiError> {
    let fields: request::Embeddings = body.part()?;
    let most = match lease {
        AnyLease::Decoder(lease) => lease.served.embedding_size,
        AnyLease::Encoder(lease) => lease.embedding_size,
        other @ AnyLease::Transcriber(_) => return Err(other.refusal()),
    };
    let dimensions = match fields.dimensions {
        Some(found) => check_range("dimensions", found.0, 1..=most)?,
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
    let input = match (fields.input, openai_messages::read(body)?) {
        (Some(_), Some(_)) => {
            let reason = "there is an input, too; expected one of them";
            return Err(ApiError::invalid("messages", reason));
        }
        (None, None) => return Err(ApiError::invalid("input", "it is missing")),
        (Some(mut texts), None) => {
            count_prompts("input", texts.list.len(), app.config.max_inputs)?;
            prompt(lease, fields.prompt_name.as_deref(), &mut texts)?;
            Input::Texts("input", texts)
        }
        (None, Some(_)) if fields.prompt_name.is_some() => {
            let reason = "it is for texts, and there are messages";
            return Err(ApiError::invalid(PROMPT_NAME, reason));
        }
        (None, Some(conversation)) => {
            let begin = fields.add_generation_prompt.unwrap_or(false);
            let add = fields.add_special_tokens.unwrap_or(false);
            let AnyLease::Decoder(lease) = lease else {
                let reason = "a text encoder takes texts, in \"input\"";
                return Err(ApiError::unsupported("messages", reason));
            };
            Input::Messages(openai_messages::tokens(lease, conversation, begin, add)?)
        }
    };
    Ok(Job {
        texts: Texts::read(app, lease, body, fields.truncate_prompt_tokens, [input])?,
        dimensions,
        base64,
    })
}

/// Puts a prompt of the model before each text: the one that is named, or the default. Tokens have what they are to have.
fn prompt(lease: &AnyLease, name: Option<&str>, texts: &mut Prompts) -> Result<(), ApiError> {
    let prompts = match lease {
        AnyLease::Decoder(lease) => &lease.served.prompts,
        AnyLease::Encoder(lease) => &lease.prompts,
        other @ AnyLease::Transcriber(_) => return Err(other.refusal()),
    };
    let before = prompts
        .text(name)
        .map_err(|reason| ApiError::invalid(PROMPT_NAME, reason))?;
    for text in &mut texts.list {
        match text {
            Prompt::Text(text) => text.insert_str(0, before),
            Prompt::Tokens(_) if !name.unwrap_or_default().is_empty() => {
                let reason = "it is for texts, and the input has tokens";
                return Err(ApiError::invalid(PROMPT_NAME, reason));
            }
            Prompt::Tokens(_) => {}
        }
    }
    Ok(())
}

/// States at length 1; a zero stays one.
pub(super) fn unit(mut states: Vec<f32>) -> Result<Vec<f32>, ApiError> {
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
