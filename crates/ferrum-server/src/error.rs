//! What is said when a request is not answered: in the shape that OpenAI's clients read,
//! `{"error": {"message", "type", "param", "code"}}`, or in that of Anthropic's,
//! `{"type": "error", "error": {"type", "message"}}`.

use crate::response::{
    AnthropicErrorBody, AnthropicErrorDetail, ErrorBody, ErrorDetail, ErrorReason, ErrorType,
};
use axum::extract::rejection::PathRejection;
use axum::http::StatusCode;
use axum::http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::response::{IntoResponse, Response};
use ferrum_engine::EngineError;

/// All places for models are taken.
const NO_PLACE: &str = "models_busy";

/// What Anthropic's clients look for before they send a conversation as a whole.
const NO_THREAD: &str = "thread_unsupported_request";

/// There is more of something than the server takes at a time.
const TOO_MANY: &str = "overloaded";

/// A refusal or a failure, with its status.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    /// Tokens of a prompt that does not fit, and how many would.
    overflow: Option<(usize, usize)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            overflow: None,
        }
    }

    fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// 400 about a field.
    pub(crate) fn invalid(param: impl Into<String>, reason: impl AsRef<str>) -> Self {
        let param = param.into();
        let message = format!("{param}: {}", reason.as_ref());
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        Self {
            param: Some(param),
            ..error
        }
    }

    /// 400 about a field that exists and that this server does not have.
    pub(crate) fn unsupported(param: impl Into<String>, reason: impl AsRef<str>) -> Self {
        Self::invalid(param, reason).coded("unsupported_parameter")
    }

    /// 400 about an image that a URL names and that cannot be fetched.
    pub(crate) fn no_media(param: impl Into<String>, reason: impl AsRef<str>) -> Self {
        Self::invalid(param, reason).coded("invalid_image_url")
    }

    /// 400 about messages that go on from those of an answer before.
    pub(crate) fn no_thread() -> Self {
        let reason = "this server keeps no conversations; send it as a whole, without thread";
        Self::invalid("thread", reason).coded(NO_THREAD)
    }

    /// 400 about a field that is not followed.
    pub(crate) fn unknown(param: impl Into<String>) -> Self {
        let reason = "this server has no such field here, or does not follow it, and is strict";
        Self::invalid(param, reason).coded("unknown_parameter")
    }

    /// Names the field that the prompt came in, where it is about the prompt.
    pub(crate) fn of_prompt(self, param: &str) -> Self {
        match self.param.as_deref() {
            Some("prompt") => Self {
                param: Some(param.into()),
                ..self
            },
            _ => self,
        }
    }

    /// 400 about the request as a whole.
    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    pub(crate) fn unauthorized(found: bool) -> Self {
        let message = match found {
            true => "the API key is not one of this server's",
            false => "there is no API key: send it as `Authorization: Bearer KEY`",
        };
        let status = StatusCode::UNAUTHORIZED;
        Self::new(status, "authentication_error", message).coded("invalid_api_key")
    }

    /// 403 about something that the key of a request is not good for.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        let status = StatusCode::FORBIDDEN;
        Self::new(status, "permission_error", message).coded("forbidden")
    }

    /// 400 about a model of another kind than a route is for.
    pub(crate) fn wrong_model(message: String) -> Self {
        let error = Self::malformed(message);
        let param = Some("model".into());
        Self { param, ..error }.coded("unsupported_model")
    }

    /// 404 about a model that a field names.
    pub(crate) fn no_model(param: &str, found: &str, served: &[String]) -> Self {
        let served = served.join(", ");
        let message = format!("there is no model {found:?} here, only {served}");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        let param = Some(param.into());
        Self { param, ..error }.coded("model_not_found")
    }

    /// 503 about a model that could not be loaded; the next request tries again.
    pub(crate) fn not_loaded(model: &str, reason: &str) -> Self {
        // Hints are for the operator of the server.
        let reason = reason.lines().next().unwrap_or_default();
        let message = format!("the model {model:?} could not be loaded: {reason}");
        Self::unavailable(message).coded("model_not_loaded")
    }

    /// 503 about a model for which no other could be unloaded in time.
    pub(crate) fn no_capacity(model: &str) -> Self {
        let message =
            format!("the model {model:?} is not loaded, and all that are loaded are busy");
        Self::unavailable(message).coded(NO_PLACE)
    }

    /// 429 about a model that too many wait for.
    pub(crate) fn many_wait(model: &str, most: usize) -> Self {
        let message = format!("{most} requests wait for the model {model:?} already");
        let status = StatusCode::TOO_MANY_REQUESTS;
        Self::new(status, "rate_limit_error", message).coded("overloaded")
    }

    pub(crate) fn no_adapter(found: &str) -> Self {
        let message = format!("lora_name: there is no adapter {found:?} here");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        let param = Some("lora_name".into());
        Self { param, ..error }.coded("model_not_found")
    }

    /// 404 about something that is kept for a while.
    pub(crate) fn not_kept(what: &str, id: &str) -> Self {
        let message = format!("there is no {what} {id:?} here, or no longer");
        let status = StatusCode::NOT_FOUND;
        Self::new(status, "invalid_request_error", message).coded("not_found")
    }

    pub(crate) fn no_route(method: &str, path: &str) -> Self {
        let message = format!("there is nothing at {method} {path}");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).coded("unknown_url")
    }

    pub(crate) fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not answer to {method}");
        let status = StatusCode::METHOD_NOT_ALLOWED;
        Self::new(status, "invalid_request_error", message).coded("method_not_allowed")
    }

    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("the body is longer than {limit} bytes");
        let status = StatusCode::PAYLOAD_TOO_LARGE;
        Self::new(status, "invalid_request_error", message).coded("body_too_large")
    }

    pub(crate) fn not_json() -> Self {
        let message = "expected a body with `Content-Type: application/json`";
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self::new(status, "invalid_request_error", message)
    }

    pub(crate) fn not_form() -> Self {
        let message = "expected a body with `Content-Type: multipart/form-data` and a boundary";
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self::new(status, "invalid_request_error", message)
    }

    pub(crate) fn slow_body() -> Self {
        let message = "the body did not come in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message)
    }

    /// The time of a request was over before its answer was.
    pub(crate) fn timeout() -> Self {
        let message = "the answer was not ready within this server's time for a request";
        let status = StatusCode::GATEWAY_TIMEOUT;
        Self::new(status, "timeout_error", message).coded("timeout")
    }

    /// 503 on a connection beyond the limit.
    pub(crate) fn no_connection() -> Self {
        Self::unavailable("the server has as many connections as it takes").coded(TOO_MANY)
    }

    /// 503 about a body for which there was no memory in time.
    pub(crate) fn many_bodies() -> Self {
        Self::unavailable("the bodies of other requests take all memory that is there for them")
            .coded(TOO_MANY)
    }

    /// 503 about images that could not be fetched because those of others were.
    pub(crate) fn many_fetches() -> Self {
        Self::unavailable("images of other requests take all time that is there to fetch them")
            .coded(TOO_MANY)
    }

    pub(crate) fn many_grammars(message: String) -> Self {
        Self::unavailable(message).coded(TOO_MANY)
    }

    /// A fault of this server.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(status, "server_error", message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(status, "server_error", message)
    }

    /// What happened in a word, if there is one.
    pub(crate) fn code(&self) -> Option<&'static str> {
        self.code
    }

    /// What happened in a word, for the log: the message may repeat what a client sent.
    pub(crate) fn word(&self) -> &'static str {
        self.code.unwrap_or(self.kind)
    }

    /// The body of the answer to Anthropic's clients.
    pub(crate) fn anthropic_body(&self) -> AnthropicErrorBody {
        AnthropicErrorBody {
            r#type: ErrorType,
            error: self.anthropic_detail(),
        }
    }

    /// What happened, for Anthropic's clients.
    pub(crate) fn anthropic_detail(&self) -> AnthropicErrorDetail {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            408 | 504 => "timeout_error",
            400..=499 => "invalid_request_error",
            _ => "api_error",
        };
        let message = match self.overflow {
            // In Anthropic's words, which clients look for before they shorten a conversation.
            Some((tokens, most)) => format!("prompt is too long: {tokens} tokens > {most} maximum"),
            None => self.message.clone(),
        };
        let no_thread = self.code == Some(NO_THREAD);
        AnthropicErrorDetail {
            r#type: kind,
            message,
            details: no_thread.then_some(ErrorReason {
                error_code: NO_THREAD,
                unsupported: &["thread"],
            }),
        }
    }

    /// The body of the answer.
    pub(crate) fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorDetail {
                message: &self.message,
                r#type: self.kind,
                param: self.param.as_deref(),
                code: self.code,
            },
        }
    }
}

impl From<PathRejection> for ApiError {
    fn from(_: PathRejection) -> Self {
        let message = "the path is not UTF-8";
        let status = StatusCode::NOT_FOUND;
        Self::new(status, "invalid_request_error", message).coded("unknown_url")
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::Invalid { field, reason } => {
                let param = match field {
                    "logit bias" => "logit_bias",
                    "stop tokens" => "stop_token_ids",
                    "prompt logprobs" => "logprobs",
                    "min tokens" => "min_tokens",
                    "bad words" => "bad_words",
                    "allowed tokens" => "allowed_token_ids",
                    other => other,
                };
                Self::invalid(param, reason)
            }
            EngineError::ContextOverflow {
                requested,
                capacity,
            } => {
                let why = match requested > capacity {
                    true => "",
                    false => ", which leaves none for an answer",
                };
                // In OpenAI's words, which clients look for.
                let message = format!(
                    "This model's maximum context length is {capacity} tokens. However, your prompt has \
                     {requested} tokens{why}. Please reduce its length. \
                     (context_length_exceeded)"
                );
                let error = Self::malformed(message).coded("context_length_exceeded");
                Self {
                    param: Some("prompt".into()),
                    overflow: Some((requested.max(capacity + 1), capacity)),
                    ..error
                }
            }
            EngineError::Overloaded { .. } => {
                let status = StatusCode::TOO_MANY_REQUESTS;
                Self::new(status, "rate_limit_error", message).coded("overloaded")
            }
            EngineError::ShuttingDown => Self::unavailable(message),
            _ => Self::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    /// In OpenAI's shape. The error is kept as an extension, for routes that use another shape.
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        let header = match self.status {
            StatusCode::UNAUTHORIZED => Some((WWW_AUTHENTICATE, "Bearer")),
            StatusCode::TOO_MANY_REQUESTS => Some((RETRY_AFTER, "1")),
            _ if [Some(NO_PLACE), Some(TOO_MANY)].contains(&self.code) => Some((RETRY_AFTER, "1")),
            _ => None,
        };
        if let Some((name, value)) = header {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response.extensions_mut().insert(self);
        response
    }
}
