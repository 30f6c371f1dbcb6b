//! `/tokenize` and `/detokenize`, as vLLM and llama.cpp have them.

use super::messages;
use crate::app::App;
use crate::error::ApiError;
use crate::models::Lease;
use crate::request::{self, Body};
use crate::{sampling, spelled};
use axum::Json;
use axum::extract::{Request, State};
use ferrum_formats::chat_template::ChatInput;
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use serde_json::{Value, json};
use std::sync::Arc;

/// Tokens of a prompt or of a conversation.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (tokens, _) = app.read(request, read_tokenize).await?;
    Ok(tokens)
}

pub(super) fn read_tokenize(
    _: &App,
    model: &Lease,
    body: &mut Body,
) -> Result<Json<Value>, ApiError> {
    let fields: request::Tokenize = body.part()?;
    let native = fields.content.is_some();
    let add = fields.add_special_tokens;
    let add = match native {
        true => fields.add_special.or(add).or(Some(false)),
        false => add,
    };
    if native && fields.prompt.is_some() {
        let reason = "there is a prompt, too; expected one of them";
        return Err(ApiError::invalid("content", reason));
    }
    let texts = fields.return_token_strs.unwrap_or(false);
    let begin = fields.add_generation_prompt;
    let tokens = match (fields.prompt.or(fields.content), messages::read(body)?) {
        (Some(_), Some(_)) => {
            let reason = "there is a prompt, too; expected one of them";
            return Err(ApiError::invalid("messages", reason));
        }
        (None, None) => return Err(ApiError::invalid("prompt", "it is missing")),
        (Some(text), None) => {
            if begin.is_some() {
                let reason = "only for messages";
                return Err(ApiError::invalid("add_generation_prompt", reason));
            }
            let options = EncodeOptions {
                add_special: add.unwrap_or(true),
                parse_special: true,
            };
            model.encode("prompt", &text, options)?
        }
        (None, Some(mut conversation)) => {
            // A template does not see what is said beside a function.
            conversation.take_functions();
            conversation.prepare(model);
            let input = ChatInput {
                add_generation_prompt: begin.unwrap_or(true),
                ..conversation.input()
            };
            let options = EncodeOptions {
                // The template has written what it wants around.
                add_special: add.unwrap_or(false),
                parse_special: true,
            };
            model.encode("messages", &model.render(&input)?, options)?
        }
    };
    let text = |&token| String::from_utf8_lossy(&model.token_bytes(token)).into_owned();
    let piece = |token: &TokenId| {
        // What is no text by itself comes as its bytes.
        let bytes = model.token_bytes(*token);
        let piece = String::from_utf8(bytes).map_or_else(|e| json!(e.into_bytes()), Value::from);
        json!({"id": token, "piece": piece})
    };
    let list = match fields.with_pieces {
        Some(true) => tokens.iter().map(piece).collect(),
        _ => json!(tokens),
    };
    Ok(Json(json!({
        "count": tokens.len(),
        "max_model_len": model.served.context,
        "tokens": list,
        "token_strs": texts.then(|| tokens.iter().map(text).collect::<Vec<_>>()),
    })))
}

/// `/apply-template`: the prompt of a conversation, as llama.cpp has it.
pub(crate) async fn apply_template(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (prompt, _) = app.read(request, read_template).await?;
    Ok(prompt)
}

fn read_template(_: &App, model: &Lease, body: &mut Body) -> Result<Json<Value>, ApiError> {
    let fields: request::Template = body.part()?;
    let conversation = messages::read(body)?;
    let mut conversation =
        conversation.ok_or_else(|| ApiError::invalid("messages", "it is missing"))?;
    conversation.take_functions();
    conversation.prepare(model);
    let input = ChatInput {
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(true),
        ..conversation.input()
    };
    let prompt = spelled::unmarked(model.render(&input)?);
    Ok(Json(json!({"prompt": prompt})))
}

/// Text of tokens, special ones included.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (text, _) = app.read(request, read_detokenize).await?;
    Ok(text)
}

pub(super) fn read_detokenize(
    _: &App,
    model: &Lease,
    body: &mut Body,
) -> Result<Json<Value>, ApiError> {
    let fields: request::Detokenize = body.part()?;
    let tokens = fields.tokens.iter();
    let tokens = tokens.map(|id| sampling::token(model, "tokens", id.0));
    let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
    let text = model.served.tokenizer.decode(&tokens, false);
    // vLLM's name of it, and llama.cpp's.
    Ok(Json(json!({"prompt": text, "content": text})))
}
