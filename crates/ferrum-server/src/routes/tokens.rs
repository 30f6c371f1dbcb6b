//! `/tokenize` and `/detokenize`, as vLLM and llama.cpp have them.

use super::openai_messages;
use crate::error::ApiError;
use crate::generation::options::token;
use crate::http::app::App;
use crate::models::Lease;
use crate::prompt::special_token_escape;
use crate::request::{self, Body};
use crate::response::{Detokenized, ListedToken, Templated, TokenPiece, Tokenized};
use axum::Json;
use axum::extract::{Request, State};
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use std::sync::Arc;

/// Tokens of a prompt or of a conversation.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Tokenized>, ApiError> {
    let (tokens, _) = app.read(request, read_tokenize).await?;
    Ok(Json(tokens))
}

pub(super) fn read_tokenize(
    _: &App,
    model: &Lease,
    body: &mut Body,
) -> Result<Tokenized, ApiError> {
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
    let tokens = match (
        fields.prompt.or(fields.content),
        openai_messages::read(body)?,
    ) {
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
        (None, Some(conversation)) => {
            // The template has written what it wants around.
            let add = add.unwrap_or(false);
            openai_messages::tokens(model, conversation, begin.unwrap_or(true), add)?
        }
    };
    let text = |&token| String::from_utf8_lossy(&model.token_bytes(token)).into_owned();
    let piece = |id: TokenId| {
        let bytes = model.token_bytes(id);
        let piece = String::from_utf8(bytes)
            .map_or_else(|e| TokenPiece::Bytes(e.into_bytes()), TokenPiece::Text);
        ListedToken::Piece { id, piece }
    };
    let listed = |&id: &TokenId| match fields.with_pieces {
        Some(true) => piece(id),
        _ => ListedToken::Id(id),
    };
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: model.served.context,
        tokens: tokens.iter().map(listed).collect(),
        token_strs: texts.then(|| tokens.iter().map(text).collect()),
    })
}

/// `/apply-template`: the prompt of a conversation, as llama.cpp has it.
pub(crate) async fn apply_template(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Templated>, ApiError> {
    let (prompt, _) = app.read(request, read_template).await?;
    Ok(Json(Templated { prompt }))
}

fn read_template(_: &App, model: &Lease, body: &mut Body) -> Result<String, ApiError> {
    let fields: request::Template = body.part()?;
    let conversation = openai_messages::read(body)?;
    let mut conversation =
        conversation.ok_or_else(|| ApiError::invalid("messages", "it is missing"))?;
    let begin = fields.add_generation_prompt.unwrap_or(true);
    let text = openai_messages::render(model, &mut conversation, begin)?;
    Ok(special_token_escape::unescape(text))
}

/// Text of tokens, special ones included.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Detokenized>, ApiError> {
    let (prompt, _) = app.read(request, read_detokenize).await?;
    let content = prompt.clone();
    Ok(Json(Detokenized { prompt, content }))
}

pub(super) fn read_detokenize(_: &App, model: &Lease, body: &mut Body) -> Result<String, ApiError> {
    let fields: request::Detokenize = body.part()?;
    let tokens = fields.tokens.iter();
    let tokens = tokens.map(|id| token(model, "tokens", id.0));
    let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
    Ok(model.served.tokenizer.decode(&tokens, false))
}
