//! `/v1/embeddings`: a vector for each text, of the states that the model has when it has read it.

use super::completions::read_prompts;
use crate::answers::{Answers, Next};
use crate::app::App;
use crate::error::ApiError;
use crate::models::Lease;
use crate::request::{self, Body};
use crate::sampling::{Place, within};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ferrum_engine::Generation;
use ferrum_engine::engine::Pooling;
use ferrum_types::TokenId;
use serde_json::json;
use std::sync::Arc;

/// Texts that are with the engine at a time, so that one request does not fill its queue.
const AT_A_TIME: usize = 64;

#[derive(Debug)]
pub(super) struct Job {
    place: Place,
    pooling: Pooling,
    texts: Vec<Vec<TokenId>>,
    dimensions: usize,
    base64: bool,
}

/// The route.
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (job, lease) = app.read(request, read).await?;
    let mut vectors: Vec<String> = Vec::with_capacity(job.texts.len());
    let mut tokens = 0;
    for texts in job.texts.chunks(AT_A_TIME) {
        let first = vectors.len();
        vectors.resize(first + texts.len(), String::new());
        let asked = texts.iter().map(|text| ferrum_engine::Request {
            pooling: Some(job.pooling),
            ..job
                .place
                .request(text.clone(), Generation::default(), &app.config)
        });
        let mut answers = Answers::begin(&lease, "input", 1, asked)?;
        while let Some(next) = answers.next().await {
            match next {
                Next::Failed(error) => return Err(error),
                Next::Done(usage) => tokens += usage.prompt_tokens,
                Next::Embedding(index, states) => vectors[first + index] = written(states, &job)?,
                Next::Prompt(..) | Next::Piece(_) => {}
            }
        }
    }
    // Put together by hand: as JSON values, the numbers would take many times their length.
    let entry = |(index, vector): (usize, &String)| {
        format!("{{\"object\":\"embedding\",\"index\":{index},\"embedding\":{vector}}}")
    };
    let entries: Vec<_> = vectors.iter().enumerate().map(entry).collect();
    let name = json!(job.place.model.name);
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    let data = entries.join(",");
    let body =
        format!("{{\"object\":\"list\",\"data\":[{data}],\"model\":{name},\"usage\":{usage}}}");
    Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
}

pub(super) fn read(app: &App, lease: &Lease, body: &mut Body) -> Result<Job, ApiError> {
    let place = Place::read(body, lease)?;
    let Some(pooling) = lease.served.pooling else {
        let reason = "its files ask for a pooling that is not known here";
        return Err(ApiError::unsupported("model", reason));
    };
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
    let texts = read_prompts(lease, "input", fields.input, app.config.max_inputs)?;
    Ok(Job {
        place,
        pooling,
        texts: texts.into_iter().map(|text| text.tokens).collect(),
        dimensions,
        base64,
    })
}

/// The first dimensions at length 1, as JSON.
fn written(mut states: Vec<f32>, job: &Job) -> Result<String, ApiError> {
    states.truncate(job.dimensions);
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
    if job.base64 {
        let bytes: Vec<u8> = states.iter().flat_map(|x| x.to_le_bytes()).collect();
        return Ok(format!("\"{}\"", BASE64_STANDARD.encode(bytes)));
    }
    let numbers: Vec<_> = states.iter().map(f32::to_string).collect();
    Ok(format!("[{}]", numbers.join(",")))
}
