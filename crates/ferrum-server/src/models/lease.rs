//! Leases: a model stays loaded for as long as a lease of it exists.

use super::residency::{Action, LoadWaiter, State};
use super::{Models, RequestedModel};
use crate::error::ApiError;
use crate::models::info::ModelKind;
use crate::models::model::Model;
use crate::models::served::{LoadedHandle, ServedEncoder, ServedTranscriber};
use crate::observability::metrics::Metrics;
use crate::observability::slots::Slots;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One hold of a loaded model.
struct Hold {
    models: Arc<Models>,
    index: usize,
}

impl Clone for Hold {
    fn clone(&self) -> Self {
        self.models.lock().hold(self.index);
        Self {
            models: Arc::clone(&self.models),
            index: self.index,
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let last = self.models.lock().release(self.index, Instant::now());
        if last {
            self.models.changed();
        }
    }
}

/// A loaded model that stays so, with what a request calls it. `M` is one that generates, one of another kind, or
/// [`LoadedHandle`] where that is still to be found out.
#[derive(Clone)]
pub(crate) struct Lease<M = Arc<Model>> {
    model: M,
    pub(crate) requested: RequestedModel,
    /// How long the request waited for it, and then for its images.
    pub(crate) waited: Duration,
    models: Arc<Models>,
    index: usize,
    hold: Option<Hold>,
}

impl Lease<LoadedHandle> {
    /// The model as one that generates.
    ///
    /// # Errors
    /// 400 for another kind.
    pub(crate) fn decoder(self) -> Result<Lease, ApiError> {
        match self.by_kind() {
            AnyLease::Decoder(lease) => Ok(lease),
            other => Err(other.refusal()),
        }
    }

    /// The model as what it is.
    pub(crate) fn by_kind(self) -> AnyLease {
        match self.model.clone() {
            LoadedHandle::Decoder(model) => AnyLease::Decoder(self.with(model)),
            LoadedHandle::Encoder(model) => AnyLease::Encoder(self.with(model)),
            LoadedHandle::Transcriber(model) => AnyLease::Transcriber(self.with(model)),
        }
    }

    fn with<M>(self, model: M) -> Lease<M> {
        Lease {
            model,
            requested: self.requested,
            waited: self.waited,
            models: self.models,
            index: self.index,
            hold: self.hold,
        }
    }
}

/// A [`Lease`] by the kind of its model.
pub(crate) enum AnyLease {
    Decoder(Lease),
    Encoder(Lease<Arc<ServedEncoder>>),
    Transcriber(Lease<Arc<ServedTranscriber>>),
}

impl AnyLease {
    /// What is said on a route that is not for such a model.
    pub(crate) fn refusal(&self) -> ApiError {
        match self {
            Self::Decoder(lease) => ModelKind::Decoder.refusal(&lease.requested.name),
            Self::Encoder(lease) => ModelKind::Encoder.refusal(&lease.requested.name),
            Self::Transcriber(lease) => ModelKind::Transcriber.refusal(&lease.requested.name),
        }
    }
}

impl Lease {
    /// The model for those who look at it and start nothing.
    pub(crate) fn model(&self) -> Arc<Model> {
        Arc::clone(&self.model)
    }
}

impl<M> Lease<M> {
    /// Where its requests are counted.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.models.entries[self.index].metrics
    }

    /// Where its answers are seen while they come.
    pub(crate) fn slots(&self) -> &Slots {
        &self.models.entries[self.index].slots
    }

    /// Lets go of the model: it may be unloaded from now on.
    pub(crate) fn release(&mut self) {
        self.hold = None;
    }
}

impl<M> Deref for Lease<Arc<M>> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.model
    }
}

impl<M> fmt::Debug for Lease<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.requested).finish()
    }
}

/// A request that waits for a model. Dropping it ends the waiting.
pub(super) struct Waiter {
    models: Arc<Models>,
    index: usize,
    load_waiter: LoadWaiter,
    since: Instant,
    /// Whether it is still to be told that it leaves.
    waits: bool,
}

impl Waiter {
    pub(super) fn enqueue(models: &Arc<Models>, index: usize) -> Self {
        Self {
            models: Arc::clone(models),
            index,
            load_waiter: models.lock().enqueue(index),
            since: Instant::now(),
            waits: true,
        }
    }

    /// Waits until the model is there.
    pub(super) async fn wait(mut self) -> Result<Lease<LoadedHandle>, ApiError> {
        // Before the first question: what changes after it is not missed.
        let mut changes = self.models.changes.subscribe();
        let mut first = true;
        loop {
            if let Some(outcome) = self.poll(first) {
                return outcome;
            }
            first = false;
            // The sender lives as long as the models.
            let _ = changes.changed().await;
        }
    }

    /// Does what is to be done now; `None` when that is to wait.
    fn poll(&mut self, first: bool) -> Option<Result<Lease<LoadedHandle>, ApiError>> {
        let models = Arc::clone(&self.models);
        let mut residency = models.lock();
        let loaded = matches!(residency.models[self.index].state, State::Loaded(_));
        if models.is_draining() && !loaded {
            drop(residency);
            return Some(Err(ApiError::unavailable("the server is shutting down")));
        }
        match residency.poll(self.index, &mut self.load_waiter, Instant::now()) {
            Action::Take => {
                self.waits = false;
                let hold = Hold {
                    models: Arc::clone(&models),
                    index: self.index,
                };
                let model = residency.models[self.index].resident();
                let model = model.map(|resident| resident.model.clone());
                drop(residency);
                let entry = &models.entries[self.index];
                let lost = || ApiError::internal("a loaded model is not there");
                return Some(model.ok_or_else(lost).map(|model| Lease {
                    model,
                    requested: RequestedModel::model(entry),
                    waited: self.since.elapsed(),
                    models: Arc::clone(&models),
                    index: self.index,
                    hold: Some(hold),
                }));
            }
            Action::Load => models.begin_load(&mut residency, self.index),
            Action::Unload(other) => models.begin_unload(&mut residency, other),
            Action::Wait => {}
            Action::Failed(reason) => {
                drop(residency);
                let name = &models.entries[self.index].name;
                return Some(Err(ApiError::not_loaded(name, &reason)));
            }
        }
        let (waiting, most) = (residency.waiting(self.index), models.limits.max_waiting);
        drop(residency);
        let full = first && waiting > most;
        full.then(|| Err(ApiError::many_wait(&models.entries[self.index].name, most)))
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.waits {
            let mut residency = self.models.lock();
            residency.cancel(self.index, &self.load_waiter, Instant::now());
            drop(residency);
            // Others may stand further ahead now.
            self.models.changed();
        }
    }
}
