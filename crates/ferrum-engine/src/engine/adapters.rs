//! LoRA adapters of a running engine: loaded beside the steps, taken between two of them, forgotten when
//! nobody uses them any more.

use super::step_loop::StepLoop;
use super::{Command, EngineError, EngineHandle, Request, Shared};
use crate::LoadedAdapter;
use ferrum_formats::LoraFolder;
use ferrum_types::AdapterId;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// An adapter on its way to the engine's thread.
pub(super) struct NewAdapter {
    id: AdapterId,
    adapter: LoadedAdapter,
    done: oneshot::Sender<Result<(), EngineError>>,
}

/// Where an adapter on the runner is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdapterState {
    Usable,
    /// Stays for the requests that have it.
    Retired,
}

impl Shared {
    /// Adapters that requests may name.
    fn adapters(&self) -> MutexGuard<'_, BTreeSet<AdapterId>> {
        // Nothing panics while it holds the lock.
        let adapters = self.adapters.lock();
        adapters.unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the adapter of a request against those that are there.
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
        let (done, answer) = oneshot::channel();
        let engine = self.clone();
        let load = move || engine.load_here(id, &folder, done);
        let thread = std::thread::Builder::new().name("ferrum-adapter".into());
        thread
            .spawn(load)
            .map_err(|e| refused(format!("cannot start a thread: {e}")))?;
        answer.await.unwrap_or_else(|_| Err(self.ending()))?;
        Ok(id)
    }

    /// Loads an adapter on this thread and hands it to the engine, which says how that went.
    fn load_here(
        &self,
        id: AdapterId,
        folder: &LoraFolder,
        done: oneshot::Sender<Result<(), EngineError>>,
    ) {
        // Nothing is behind the lock that a panic could leave half done.
        let turn = self.shared.adapter_loading.lock();
        let turn = turn.unwrap_or_else(PoisonError::into_inner);
        let loaded = self.shared.adapter_loader.load(folder);
        drop(turn);
        match loaded {
            Ok(adapter) => {
                let new = NewAdapter { id, adapter, done };
                // If nobody reads it, there is no answer.
                let _ = self.commands.send(Command::AddAdapter(Box::new(new)));
            }
            Err(error) => {
                // Whoever wanted it may have gone.
                let _ = done.send(Err(refused(error.to_string())));
            }
        }
    }

    /// Refuses new requests with an adapter; requests that have it go on, and with the last of them its
    /// memory is free. Whether it was there.
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
        let answer = match added {
            Ok(()) => {
                self.adapters.insert(new.id, AdapterState::Usable);
                self.shared.adapters().insert(new.id);
                Ok(())
            }
            Err(error) => Err(refused(error.to_string())),
        };
        if new.done.send(answer).is_err() {
            // Whoever wanted it has gone, and nobody else knows its name.
            self.shared.adapters().remove(&new.id);
            self.retire_adapter(new.id);
        }
    }

    /// From here on no request comes that names the adapter: those before this command have come.
    pub(super) fn retire_adapter(&mut self, id: AdapterId) {
        if let Some(state) = self.adapters.get_mut(&id) {
            *state = AdapterState::Retired;
        }
        self.forget_adapters();
    }

    /// An adapter may have gone between the door and here.
    pub(super) fn find_adapter(&self, request: &Request) -> Result<(), EngineError> {
        match request.adapter {
            Some(id) if !self.adapters.contains_key(&id) => Err(unknown(id)),
            _ => Ok(()),
        }
    }

    /// Forgets retired adapters that no request has, and no step in flight.
    pub(super) fn forget_adapters(&mut self) {
        let (runner, open, flight) = (&mut self.runner, &self.open, &self.flight);
        self.adapters.retain(|&id, state| {
            let in_flight = || flight.as_ref().is_some_and(|f| f.has_adapter(id));
            let used = || open.values().any(|o| o.adapter == Some(id)) || in_flight();
            let keep = *state == AdapterState::Usable || used();
            if !keep {
                runner.unload_adapter(id);
            }
            keep
        });
    }
}
