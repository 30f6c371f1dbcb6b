//! Loads LoRA adapters in the background, installs them between steps and frees them after their last request.

use super::state::{AdapterState, StepLoop};
use super::{Command, EngineError, EngineHandle, Request, Shared};
use crate::LoadedAdapter;
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::sync::thread;
use ferrum_formats::LoraFolder;
use ferrum_types::AdapterId;
use std::collections::BTreeSet;
use std::sync::PoisonError;
use tokio::sync::oneshot;

/// A loaded adapter that is sent to the engine's thread.
pub(super) struct NewAdapter {
    id: AdapterId,
    adapter: LoadedAdapter,
    done: oneshot::Sender<Result<(), EngineError>>,
}

impl Shared {
    /// Adapters that requests may name.
    fn adapters(&self) -> MutexGuard<'_, BTreeSet<AdapterId>> {
        // Nothing panics while it holds the lock.
        let adapters = self.adapters.lock();
        adapters.unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that the adapter of a request is loaded.
    pub(super) fn check_adapter(&self, request: &Request) -> Result<(), EngineError> {
        match request.adapter {
            Some(id) if !self.adapters().contains(&id) => Err(unknown(id)),
            _ => Ok(()),
        }
    }
}

fn unknown(AdapterId(id): AdapterId) -> EngineError {
    refused(format!("number {id} is not loaded"))
}

fn refused(reason: String) -> EngineError {
    let field = "adapter";
    EngineError::Invalid { field, reason }
}

impl EngineHandle {
    /// Loads a LoRA adapter for requests that name it, on a thread of its own: steps go on meanwhile. One
    /// adapter is loaded at a time.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] when it does not fit the model or its memory; what
    /// [`submit`](Self::submit) says of an engine that takes nothing more.
    pub async fn load_adapter(&self, folder: LoraFolder) -> Result<AdapterId, EngineError> {
        let shared = &self.shared;
        if let Some(refusal) = shared.phase.borrow().refusal() {
            return Err(refusal);
        }
        let id = AdapterId(shared.next_adapter.fetch_add(1, Ordering::Relaxed));
        let (done, result) = oneshot::channel();
        let engine = self.clone();
        let load = move || engine.load_here(id, &folder, done);
        let thread = thread::Builder::new().name("ferrum-adapter".into());
        thread
            .spawn(load)
            .map_err(|e| refused(format!("cannot start a thread: {e}")))?;
        result.await.unwrap_or_else(|_| Err(self.end_error()))?;
        Ok(id)
    }

    /// Loads an adapter on this thread and sends it to the engine, which reports the result through `done`.
    fn load_here(
        &self,
        id: AdapterId,
        folder: &LoraFolder,
        done: oneshot::Sender<Result<(), EngineError>>,
    ) {
        // The lock protects no state that a panic could leave inconsistent.
        let loading = self.shared.adapter_loading.lock();
        let loading = loading.unwrap_or_else(PoisonError::into_inner);
        let loaded = self.shared.adapter_loader.load(folder);
        drop(loading);
        match loaded {
            Ok(adapter) => {
                let new = NewAdapter { id, adapter, done };
                // An engine that has ended drops `done`.
                let _ = self.commands.send(Command::AddAdapter(Box::new(new)));
            }
            Err(error) => {
                // The caller may have stopped waiting.
                let _ = done.send(Err(refused(error.to_string())));
            }
        }
    }

    /// Refuses new requests with an adapter. Requests that use it continue, and its memory is freed after the last of
    /// them. Returns whether it was loaded.
    pub fn unload_adapter(&self, id: AdapterId) -> bool {
        let known = self.shared.adapters().remove(&id);
        if known {
            // An engine that has ended has no adapters.
            let _ = self.commands.send(Command::RetireAdapter(id));
        }
        known
    }
}

impl StepLoop<'_> {
    pub(super) fn add_adapter(&mut self, new: NewAdapter) {
        let added = self.runner.add_adapter(new.id, new.adapter);
        let result = match added {
            Ok(()) => {
                self.adapters.insert(new.id, AdapterState::Usable);
                self.shared.adapters().insert(new.id);
                Ok(())
            }
            Err(error) => Err(refused(error.to_string())),
        };
        if new.done.send(result).is_err() {
            // The caller stopped waiting, and no one else knows the id.
            self.shared.adapters().remove(&new.id);
            self.retire_adapter(new.id);
        }
    }

    /// Retires an adapter. No later request names it: requests that do were sent before this command.
    pub(super) fn retire_adapter(&mut self, id: AdapterId) {
        if let Some(state) = self.adapters.get_mut(&id) {
            *state = AdapterState::Retired;
        }
        self.forget_adapters();
    }

    /// Checks again that the adapter is there: it may have been unloaded after [`check_adapter`](Shared::check_adapter).
    pub(super) fn find_adapter(&self, request: &Request) -> Result<(), EngineError> {
        match request.adapter {
            Some(id) if !self.adapters.contains_key(&id) => Err(unknown(id)),
            _ => Ok(()),
        }
    }

    /// Unloads retired adapters that neither a request nor the step in flight uses.
    pub(super) fn forget_adapters(&mut self) {
        let (runner, requests, in_flight) = (&mut self.runner, &self.requests, &self.in_flight);
        self.adapters.retain(|&id, state| {
            let in_step = || in_flight.as_ref().is_some_and(|step| step.has_adapter(id));
            let mut adapters = requests.values().map(|request| request.adapter);
            let mut used = || adapters.any(|adapter| adapter == Some(id)) || in_step();
            let keep = *state == AdapterState::Usable || used();
            if !keep {
                runner.unload_adapter(id);
            }
            keep
        });
    }
}
