//! Errors in the two shapes that clients read.

use serde::Serialize;
use utoipa::ToSchema;

literals! {
    ErrorType = "error";
}

/// An error in OpenAI's shape.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorBody<'a> {
    pub(crate) error: ErrorDetail<'a>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorDetail<'a> {
    pub(crate) message: &'a str,
    pub(crate) r#type: &'a str,
    /// The field that it is about.
    #[schema(required)]
    pub(crate) param: Option<&'a str>,
    #[schema(required)]
    pub(crate) code: Option<&'a str>,
}

/// An error in Anthropic's shape.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicError)]
pub(crate) struct AnthropicErrorBody {
    #[schema(inline)]
    pub(crate) r#type: ErrorType,
    pub(crate) error: AnthropicErrorDetail,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct AnthropicErrorDetail {
    pub(crate) r#type: &'static str,
    pub(crate) message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) details: Option<ErrorReason>,
}

/// What a client has to know to ask in another way.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ErrorReason {
    pub(crate) error_code: &'static str,
    /// Fields that this server does not have.
    pub(crate) unsupported: &'static [&'static str],
}
