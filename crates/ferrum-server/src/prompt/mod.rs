//! From requests to prompts: conversations, images, fill-in-the-middle and escaping of special tokens.

pub(crate) mod conversation;
pub(crate) mod fim;
pub(crate) mod images;
pub(crate) mod parts;
pub(crate) mod pending_prompt;
pub(crate) mod special_token_escape;
pub(crate) mod template_limits;
