//! Requests that are read up to their prompts: images that are elsewhere are fetched first, which is no work for a thread that
//! reads requests.

use crate::error::ApiError;
use crate::media::{FetchedImage, RemoteImage};
use crate::models::Lease;
use crate::models::model::Model;
use crate::prompt::conversation::Conversation;
use crate::prompt::images;

type Finish<T> = dyn FnOnce(Conversation, &Lease) -> Result<T, ApiError> + Send;

/// A conversation, and what makes a request of it when its images are there.
pub(crate) struct PendingPrompt<T> {
    conversation: Conversation,
    finish: Box<Finish<T>>,
}

impl<T> PendingPrompt<T> {
    pub(crate) fn new(
        conversation: Conversation,
        finish: impl FnOnce(Conversation, &Lease) -> Result<T, ApiError> + Send + 'static,
    ) -> Self {
        Self {
            conversation,
            finish: Box::new(finish),
        }
    }

    /// See [`images::remote`].
    pub(crate) fn remote_images(&mut self, model: &Model) -> Result<Vec<RemoteImage>, ApiError> {
        images::remote(model, &mut self.conversation.messages)
    }

    /// See [`images::put`].
    pub(crate) fn put_images(&mut self, fetched: &mut [FetchedImage]) {
        images::put(&mut self.conversation.messages, fetched);
    }

    /// Makes the prompt, and the request with it.
    pub(crate) fn finish(self, lease: &Lease) -> Result<T, ApiError> {
        (self.finish)(self.conversation, lease)
    }
}
