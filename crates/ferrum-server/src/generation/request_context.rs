//! Model, priority and tenant of a request, and the engine request made of them.

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::models::{Lease, RequestedModel};
use crate::request::{Body, Standing};
use ferrum_engine::{GenerationParams, Request};
use ferrum_types::TokenId;
use std::time::Duration;

/// Model, priority and tenant of a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestContext {
    pub(crate) model: RequestedModel,
    priority: i8,
    tenant: Option<String>,
    /// How long it has waited for its model and images.
    waited: Duration,
}

impl RequestContext {
    /// Reads the fields; the lease is of the model that the request names.
    pub(crate) fn read<M>(body: &mut Body, lease: &Lease<M>) -> Result<Self, ApiError> {
        let standing: Standing = body.part()?;
        Ok(Self {
            model: lease.requested.clone(),
            // The range is that of the type.
            priority: standing.priority.map_or(0, |priority| priority.0 as i8),
            tenant: standing.cache_salt,
            waited: lease.waited,
        })
    }

    /// Higher goes first.
    pub(crate) fn priority(&self) -> i8 {
        self.priority
    }

    /// Notes how long the request has waited until now.
    pub(crate) fn set_waited<M>(&mut self, lease: &Lease<M>) {
        self.waited = lease.waited;
    }

    /// Time that is left for the answer.
    pub(crate) fn time_left(&self, config: &ServerConfig) -> Duration {
        config.request_timeout.saturating_sub(self.waited)
    }

    /// A request to the engine.
    pub(crate) fn request(
        &self,
        prompt: Vec<TokenId>,
        generation: GenerationParams,
        config: &ServerConfig,
    ) -> Request {
        Request {
            priority: self.priority,
            tenant: self.tenant.clone(),
            adapter: self.model.adapter,
            timeout: Some(self.time_left(config)),
            ..Request::new(prompt, generation)
        }
    }
}
