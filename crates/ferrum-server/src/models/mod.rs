//! Loads models on demand and evicts idle ones.
//!
//! A request asks for a model by name and gets a [`Lease`]. It may have to wait: for a load that is under way, which all
//! requests for the model share, or for capacity, if the number of loaded models is limited. `residency.rs` decides which
//! models are loaded and evicted; this file carries that out on threads of their own, because loads take minutes and
//! would keep requests from being read. A model with a lease is not unloaded, so no answer is cut off.
//!
//! A failed load is reported to its waiters; the next request retries. An engine that fails stays resident and reports
//! unhealthy until the server restarts.

pub(crate) mod adapters;
pub(crate) mod info;
mod lease;
pub(crate) mod model;
mod residency;
pub(crate) mod served;
#[cfg(test)]
mod tests;
pub(crate) mod vision;

pub(crate) use lease::{AnyLease, Lease};
#[cfg(test)]
pub(crate) use tests::demo;

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::ids::unix_time;
use crate::observability::metrics::Metrics;
use crate::observability::slots::Slots;
use crate::response::Slot;
use adapters::{Adapter, Adapters};
use ferrum_engine::Health;
use ferrum_engine::engine::EngineStats;
use ferrum_types::AdapterId;
use info::ModelInfo;
use lease::Waiter;
use residency::{IdleExpiry, Residency, Resident as _, State};
use served::{EngineMonitor, LoadedHandle, LoadedModel, OwnedEngine};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// What happens to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelEvent<'a> {
    /// It is being loaded.
    Loading,
    /// It can be used, after so long.
    Loaded(Duration),
    /// It could not be loaded, and why.
    Failed(&'a str),
    /// It was unloaded.
    Unloaded,
}

/// Opens models by the names that requests have for them: what is known around this crate, and not in it.
pub trait ModelLoader: Send + Sync + 'static {
    /// Loads a model. Called on a thread that may take its time, for several models at once.
    ///
    /// # Errors
    /// Why it cannot be loaded, for a person.
    fn load(&self, name: &str) -> Result<LoadedModel, String>;

    /// Receives what happens to a model.
    fn on_event(&self, _name: &str, _event: ModelEvent<'_>) {}
}

impl<F> ModelLoader for F
where
    F: Fn(&str) -> Result<LoadedModel, String> + Send + Sync + 'static,
{
    fn load(&self, name: &str) -> Result<LoadedModel, String> {
        self(name)
    }
}

/// What a request means by its `model`.
#[derive(Clone, Debug)]
pub(crate) struct RequestedModel {
    /// As the request calls it.
    pub(crate) name: String,
    pub(crate) adapter: Option<AdapterId>,
}

impl RequestedModel {
    fn model(entry: &ModelEntry) -> Self {
        Self {
            name: entry.name.clone(),
            adapter: None,
        }
    }
}

/// A model of the server, loaded or not.
pub(crate) struct ModelEntry {
    pub(crate) name: String,
    pub(crate) metrics: Metrics,
    /// What is being answered.
    pub(crate) slots: Slots,
    /// Set when it is loaded for the first time.
    info: OnceLock<ModelInfo>,
    /// What its engines counted that are no more.
    past: Mutex<EngineStats>,
    /// Loads that came to an end, good or bad.
    loads: AtomicU64,
    failed_loads: AtomicU64,
}

impl ModelEntry {
    /// `None` for a model that was never loaded.
    pub(crate) fn info(&self) -> Option<&ModelInfo> {
        self.info.get()
    }
}

/// What is exported of a model at a scrape. A model that is not loaded keeps its counts and runs nothing.
pub(crate) struct ModelSnapshot<'a> {
    pub(crate) model: &'a str,
    pub(crate) loaded: bool,
    /// Loads that have ended, and those of them that came to nothing.
    pub(crate) loads: u64,
    pub(crate) failed_loads: u64,
    /// Most adapters at a time; `None` where there can be none.
    pub(crate) max_adapters: Option<usize>,
    pub(crate) stats: EngineStats,
    pub(crate) metrics: &'a Metrics,
}

/// Summary of a model for the caller of [`Server`](crate::Server).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSummary {
    /// As requests call it.
    pub name: String,
    /// What it is in a word (`decoder`, `encoder`, `speech`); `None` for a model that was never loaded.
    pub kind: Option<&'static str>,
    /// Most tokens of a sequence, if sequences are texts.
    pub context: Option<usize>,
    /// Tokens that the KV cache holds over all sequences, if there is one.
    pub kv_tokens: Option<usize>,
}

/// Where a model is in its life, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Unloaded,
    Loading,
    Loaded,
    Unloading,
    /// It could not be loaded, or its engine broke.
    Failed(String),
}

/// A model that is in memory.
struct Resident {
    model: LoadedHandle,
    /// Gone when it is being unloaded.
    engine: Option<OwnedEngine>,
}

impl residency::Resident for Resident {
    fn has_failed(&self) -> bool {
        self.model.monitor().failure().is_some()
    }
}

/// Bounds that come from the server's settings.
struct Limits {
    max_waiting: usize,
    max_adapters: usize,
    timeout: Duration,
    idle: Option<Duration>,
    /// Whether a name that nothing has means the first model.
    any_name: bool,
}

/// See the [module](self).
pub(crate) struct Models {
    entries: Vec<ModelEntry>,
    /// Further names, each with the number of its model.
    aliases: Vec<(String, usize)>,
    loader: Arc<dyn ModelLoader>,
    residency: Mutex<Residency<Resident>>,
    /// Notifies waiters of changes.
    changes: watch::Sender<()>,
    adapters: Adapters,
    limits: Limits,
    draining: AtomicBool,
    created: u64,
}

impl Models {
    /// Models of these names, none of them loaded; the first is meant by requests that name none.
    pub(crate) fn new(
        names: Vec<String>,
        loader: Arc<dyn ModelLoader>,
        config: &ServerConfig,
    ) -> Arc<Self> {
        let most = config.max_loaded_models.unwrap_or(names.len());
        let residency = Residency::new(
            names.len(),
            most,
            config.model_min_residency,
            Instant::now(),
        );
        let entries = names.into_iter().map(|name| ModelEntry {
            name,
            metrics: Metrics::new(),
            slots: Slots::default(),
            info: OnceLock::new(),
            past: Mutex::default(),
            loads: AtomicU64::new(0),
            failed_loads: AtomicU64::new(0),
        });
        let entries: Vec<_> = entries.collect();
        let alias = |(alias, name): &(String, String)| {
            let index = entries.iter().position(|entry| entry.name == *name)?;
            Some((alias.clone(), index))
        };
        Arc::new(Self {
            aliases: config.aliases.iter().filter_map(alias).collect(),
            entries,
            loader,
            residency: Mutex::new(residency),
            changes: watch::Sender::new(()),
            adapters: Adapters::default(),
            limits: Limits {
                max_waiting: config.max_waiting,
                max_adapters: config.max_adapters,
                timeout: config.request_timeout,
                idle: config.idle_unload,
                any_name: config.any_model_name,
            },
            draining: AtomicBool::new(false),
            created: unix_time(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Residency<Resident>> {
        // Nothing panics between the changes of a slot.
        self.residency
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_replace(());
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    // ---- Names

    /// Seconds since 1970 at which the server began.
    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    /// The models in the order in which they were given.
    pub(crate) fn list(&self) -> impl Iterator<Item = (&ModelEntry, Status)> {
        let residency = self.lock();
        let status = residency.models.iter().map(|slot| match &slot.state {
            State::Loading => Status::Loading,
            State::Unloading(_) => Status::Unloading,
            State::Loaded(resident) => match resident.model.monitor().failure() {
                None => Status::Loaded,
                Some(reason) => Status::Failed(reason),
            },
            State::Unloaded => match &slot.failure {
                None => Status::Unloaded,
                Some((_, reason)) => Status::Failed(reason.clone()),
            },
        });
        let status: Vec<_> = status.collect();
        self.entries.iter().zip(status)
    }

    /// See [`ModelSummary`].
    pub(crate) fn summaries(&self) -> Vec<ModelSummary> {
        let summary = |entry: &ModelEntry| {
            let info = entry.info.get();
            ModelSummary {
                name: entry.name.clone(),
                kind: info.map(|info| info.kind.word()),
                context: info.and_then(|info| info.context),
                kv_tokens: info.and_then(|info| info.kv_tokens),
            }
        };
        self.entries.iter().map(summary).collect()
    }

    /// The aliases, each with its model.
    pub(crate) fn aliases(&self) -> impl Iterator<Item = (&str, &ModelEntry)> {
        let all = self.aliases.iter();
        all.map(|(alias, index)| (alias.as_str(), &self.entries[*index]))
    }

    /// The adapters by name, each with its model.
    pub(crate) fn adapters(&self) -> Vec<(String, Adapter, &ModelEntry)> {
        let all = self.adapters.list().into_iter();
        let with_model = |(name, adapter): (String, Adapter)| {
            let entry = self.entries.get(adapter.model)?;
            Some((name, adapter, entry))
        };
        all.filter_map(with_model).collect()
    }

    /// All that a request can name.
    pub(crate) fn names(&self) -> Vec<String> {
        let models = self.entries.iter().map(|entry| entry.name.clone());
        let adapters = self.adapters.list().into_iter().map(|(name, _)| name);
        let aliases = self.aliases.iter().map(|(alias, _)| alias.clone());
        models.chain(adapters).chain(aliases).collect()
    }

    /// What is said of a name that nothing here has.
    pub(crate) fn unknown(&self, name: &str) -> ApiError {
        ApiError::no_model("model", name, &self.names())
    }

    /// Which model a request means, and which adapter of it.
    fn find(&self, asked: Option<&str>) -> Result<(usize, Option<Adapter>), ApiError> {
        let Some(asked) = asked else {
            return Ok((0, None));
        };
        if let Some(index) = self.entries.iter().position(|entry| entry.name == asked) {
            return Ok((index, None));
        }
        if let Some(adapter) = self.adapters.get(asked) {
            return Ok((adapter.model, Some(adapter)));
        }
        match self.aliases.iter().find(|(alias, _)| alias == asked) {
            Some((_, index)) => Ok((*index, None)),
            None if self.limits.any_name => Ok((0, None)),
            None => Err(self.unknown(asked)),
        }
    }

    /// What a request means by its `model`, in full: the default where it says nothing.
    pub(crate) fn full_name<'a>(&'a self, asked: Option<&'a str>) -> Result<&'a str, ApiError> {
        let (index, _) = self.find(asked)?;
        Ok(asked.unwrap_or(&self.entries[index].name))
    }

    // ---- Leases

    /// The model that a request asks for, as soon as it is there.
    ///
    /// # Errors
    /// 404 for a name that nothing has; 429 when too many wait for the model; 503 when it cannot be
    /// loaded, when no capacity became free in time, and when the server is ending; 504 when loading
    /// takes too long.
    pub(crate) async fn lease_any(
        self: &Arc<Self>,
        asked: Option<&str>,
    ) -> Result<Lease<LoadedHandle>, ApiError> {
        let (index, adapter) = self.find(asked)?;
        let lease = async {
            let mut lease = Waiter::enqueue(self, index).wait().await?;
            if let Some(name) = asked {
                let adapter = match adapter {
                    Some(adapter) => {
                        let lease = lease.clone().decoder()?;
                        Some(self.reload_adapter(&lease, name, &adapter).await?)
                    }
                    None => None,
                };
                // Answers name the model as the request does, also where that is an alias.
                lease.requested = RequestedModel {
                    name: name.to_owned(),
                    adapter,
                };
            }
            Ok(lease)
        };
        match tokio::time::timeout(self.limits.timeout, lease).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.late(index)),
        }
    }

    /// [`lease_any`](Self::lease_any) of a model that generates.
    ///
    /// # Errors
    /// Those of `lease_any`, and 400 for another kind of model.
    pub(crate) async fn lease(self: &Arc<Self>, asked: Option<&str>) -> Result<Lease, ApiError> {
        self.lease_any(asked).await?.decoder()
    }

    /// Loads a model, however long it takes.
    ///
    /// # Errors
    /// As the loader says them.
    pub(crate) async fn preload(self: &Arc<Self>, name: &str) -> Result<(), String> {
        let index = self.entries.iter().position(|entry| entry.name == name);
        let index = index.ok_or_else(|| self.unknown(name).to_string())?;
        let loaded = Waiter::enqueue(self, index).wait().await;
        let Err(error) = loaded else { return Ok(()) };
        let failure = self.lock().models[index].failure.clone();
        Err(failure.map_or_else(|| error.to_string(), |(_, reason)| reason))
    }

    /// What is said when a model was not there in time.
    fn late(&self, index: usize) -> ApiError {
        let residency = self.lock();
        match residency.models[index].state {
            State::Loading | State::Loaded(_) => ApiError::timeout(),
            State::Unloaded | State::Unloading(_) => {
                ApiError::no_capacity(&self.entries[index].name)
            }
        }
    }

    fn begin_load(self: &Arc<Self>, residency: &mut Residency<Resident>, index: usize) {
        let models = Arc::clone(self);
        let load = move || models.load(index);
        let thread = thread::Builder::new().name("ferrum-load".into());
        if let Err(e) = thread.spawn(load) {
            let reason = format!("cannot start a thread: {e}");
            residency.loaded(index, Err(reason), Instant::now());
            self.changed();
        }
    }

    /// Loads a model, on a thread of its own.
    fn load(&self, index: usize) {
        let entry = &self.entries[index];
        let began = Instant::now();
        let load = || {
            self.loader.on_event(&entry.name, ModelEvent::Loading);
            let (engine, model) = self.loader.load(&entry.name)?.split();
            Ok(Resident {
                model,
                engine: Some(engine),
            })
        };
        let loaded = catch_unwind(AssertUnwindSafe(load));
        let loaded = loaded.unwrap_or_else(|_| Err("loading it panicked".to_owned()));
        entry.loads.fetch_add(1, Ordering::Relaxed);
        let event = match &loaded {
            Ok(resident) => {
                entry.info.get_or_init(|| resident.model.info());
                ModelEvent::Loaded(began.elapsed())
            }
            Err(reason) => {
                entry.failed_loads.fetch_add(1, Ordering::Relaxed);
                ModelEvent::Failed(reason)
            }
        };
        // Before other threads can act on the outcome, so that events are in order.
        self.loader.on_event(&entry.name, event);
        let mut residency = self.lock();
        // The engine has no requests yet, so nothing is lost.
        let (loaded, unwanted) = match loaded {
            Ok(resident) if self.is_draining() => (
                Err("the server is shutting down".to_owned()),
                Some(resident),
            ),
            loaded => (loaded, None),
        };
        residency.loaded(index, loaded, Instant::now());
        drop(residency);
        self.changed();
        drop(unwanted);
    }

    fn begin_unload(self: &Arc<Self>, residency: &mut Residency<Resident>, index: usize) {
        let Some(resident) = residency.unload(index) else {
            return;
        };
        let engine = resident.engine.take();
        let models = Arc::clone(self);
        let unload = move || {
            // Waits for the engine's thread, which owns the weights.
            drop(engine);
            let gone = models.end(&mut models.lock(), index);
            drop(gone);
            models.changed();
            let name = &models.entries[index].name;
            models.loader.on_event(name, ModelEvent::Unloaded);
        };
        let thread = thread::Builder::new().name("ferrum-unload".into());
        if thread.spawn(unload).is_err() {
            // The engine has ended with what was to be the thread.
            drop(self.end(residency, index));
            self.changed();
        }
    }

    /// Books that a model has ended; what is left of it is to be dropped without the lock.
    fn end(&self, residency: &mut Residency<Resident>, index: usize) -> State<Resident> {
        let gone = residency.unloaded(index);
        if let State::Unloading(resident) = &gone {
            let stats = resident.model.monitor().stats();
            let past = self.entries[index].past.lock();
            let mut past = past.unwrap_or_else(PoisonError::into_inner);
            *past = stats.with_earlier(&past);
        }
        gone
    }

    /// Unloads models that have been idle for a while, for as long as the server runs.
    pub(crate) async fn unload_idle_models(self: Arc<Self>) {
        let Some(idle) = self.limits.idle else {
            return;
        };
        let mut changes = self.changes.subscribe();
        loop {
            changes.mark_unchanged();
            let next = loop {
                let mut residency = self.lock();
                match residency.idle_expiry(idle, Instant::now()) {
                    IdleExpiry::Expired(_) if self.is_draining() => break None,
                    IdleExpiry::Expired(index) => self.begin_unload(&mut residency, index),
                    IdleExpiry::In(wait) => break Some(wait),
                    IdleExpiry::Never => break None,
                }
            };
            match next {
                Some(wait) => {
                    let _ = tokio::time::timeout(wait, changes.changed()).await;
                }
                None => {
                    let _ = changes.changed().await;
                }
            }
        }
    }

    // ---- Adapters

    /// Loads a LoRA adapter under `name` for the model `base`, or the first.
    pub(crate) async fn load_adapter(
        self: &Arc<Self>,
        name: &str,
        dir: &Path,
        base: Option<&str>,
    ) -> Result<(), ApiError> {
        self.add_adapter(name, dir, base, false).await
    }

    async fn add_adapter(
        self: &Arc<Self>,
        name: &str,
        dir: &Path,
        base: Option<&str>,
        given: bool,
    ) -> Result<(), ApiError> {
        let model = self.base(base)?;
        let reserved = self.reserve_adapter_name(name)?;
        let lease = self.lease(Some(&self.entries[model].name)).await?;
        let id = adapters::load(&lease.served.engine, dir).await?;
        lease.adapters.insert(reserved.key(), id);
        reserved.fill(model, dir, given);
        Ok(())
    }

    /// Takes note of an adapter of the first model, which is loaded with it: now if it is there, else when
    /// it is asked for.
    pub(crate) async fn add_startup_adapter(
        self: &Arc<Self>,
        name: &str,
        dir: &Path,
    ) -> Result<(), ApiError> {
        if matches!(self.lock().models[0].state, State::Loaded(_)) {
            return self.add_adapter(name, dir, None, true).await;
        }
        let reserved = self.reserve_adapter_name(name)?;
        adapters::open(dir).await?;
        reserved.fill(0, dir, true);
        Ok(())
    }

    fn reserve_adapter_name<'a>(
        &'a self,
        name: &'a str,
    ) -> Result<adapters::ReservedName<'a>, ApiError> {
        if self.entries.iter().any(|entry| entry.name == name) {
            return Err(ApiError::invalid("lora_name", "the model has this name"));
        }
        self.adapters.take(name, self.limits.max_adapters)
    }

    fn base(&self, name: Option<&str>) -> Result<usize, ApiError> {
        let Some(name) = name else {
            return Ok(0);
        };
        let found = self.entries.iter().position(|entry| entry.name == name);
        found.ok_or_else(|| {
            let names: Vec<_> = self
                .entries
                .iter()
                .map(|entry| entry.name.clone())
                .collect();
            ApiError::no_model("base_model_name", name, &names)
        })
    }

    /// The number of an adapter in an engine, which may not have been there when it was loaded first.
    async fn reload_adapter(
        &self,
        lease: &Lease,
        name: &str,
        adapter: &Adapter,
    ) -> Result<AdapterId, ApiError> {
        let engine = &lease.served.engine;
        let id = lease.adapters.get_or_load(engine, adapter).await;
        let id = id.map_err(|e| {
            let message = format!("the adapter {name:?} could not be loaded again: {e}");
            ApiError::unavailable(message)
        })?;
        // A concurrent request may have removed it before it was in the engine.
        let current = self.adapters.get(name);
        if current.is_none_or(|current| current.key != adapter.key) {
            lease.adapters.unload(engine, adapter.key);
            return Err(self.unknown(name));
        }
        Ok(id)
    }

    /// Takes an adapter away; answers that have begun with it go on. One that was given at the start goes only
    /// with `given_too`.
    ///
    /// # Errors
    /// 404 when there is none of that name, 403 when it has to stay.
    pub(crate) fn unload_adapter(&self, name: &str, given_too: bool) -> Result<(), ApiError> {
        let adapter = self.adapters.remove(name, given_too)?;
        let residency = self.lock();
        let resident = residency.models[adapter.model].resident();
        if let Some(model) = resident.and_then(|resident| resident.model.decoder()) {
            model.adapters.unload(&model.served.engine, adapter.key);
        }
        Ok(())
    }

    // ---- Health, figures, the end

    /// The engines that there are, with their models' names.
    pub(crate) fn engines(&self) -> Vec<(&str, EngineMonitor)> {
        let residency = self.lock();
        let slots = self.entries.iter().zip(&residency.models);
        let engines = slots.filter_map(|(entry, slot)| {
            let resident = slot.resident()?;
            // One that was told to end is of interest only as long as it has not.
            let told = matches!(slot.state, State::Unloading(_));
            let engine = resident.model.monitor();
            (!told || engine.health() != Health::Stopped).then_some((entry.name.as_str(), engine))
        });
        engines.collect()
    }

    /// What a model is answering, in llama.cpp's shape; nothing of one that is not loaded.
    ///
    /// # Errors
    /// 404 for a name that nothing has.
    pub(crate) fn slots(&self, asked: Option<&str>) -> Result<Vec<Slot>, ApiError> {
        let (index, _) = self.find(asked)?;
        let entry = &self.entries[index];
        let residency = self.lock();
        let model = residency.models[index].resident();
        let model = model.and_then(|resident| resident.model.decoder());
        let sizes = model.map(|model| (model.served.engine.max_seqs(), model.served.context));
        drop(residency);
        Ok(sizes.map_or_else(Vec::new, |(count, context)| {
            entry.slots.list(count, context)
        }))
    }

    /// Snapshots of all models, for metrics.
    pub(crate) fn snapshots(&self) -> Vec<ModelSnapshot<'_>> {
        let adapters = self.adapters().into_iter();
        let adapted: Vec<_> = adapters.map(|(_, _, entry)| &entry.name).collect();
        let most = self.limits.max_adapters;
        let residency = self.lock();
        let models = self.entries.iter().zip(&residency.models);
        let snapshots = models.map(|(entry, slot)| {
            let past = entry.past.lock();
            let past = *past.unwrap_or_else(PoisonError::into_inner);
            let resident = slot.resident();
            let stats = resident.map(|resident| resident.model.monitor().stats());
            ModelSnapshot {
                model: &entry.name,
                loaded: matches!(&slot.state, State::Loaded(resident) if !resident.has_failed()),
                loads: entry.loads.load(Ordering::Relaxed),
                failed_loads: entry.failed_loads.load(Ordering::Relaxed),
                max_adapters: adapted.contains(&&entry.name).then_some(most),
                stats: stats.unwrap_or_default().with_earlier(&past),
                metrics: &entry.metrics,
            }
        });
        snapshots.collect()
    }

    /// Takes nothing new; answers go on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        for (_, engine) in self.engines() {
            engine.drain();
        }
        self.changed();
    }

    /// Waits until all engines have ended, for whatever reason.
    pub(crate) async fn stopped(&self) {
        for (_, engine) in self.engines() {
            engine.stopped().await;
        }
    }

    /// The models whose engines have not ended.
    pub(crate) fn unended(&self) -> Vec<String> {
        let engines = self.engines().into_iter();
        let unended = engines.filter(|(_, engine)| {
            matches!(
                engine.health(),
                Health::Alive { .. } | Health::Stalled { .. }
            )
        });
        unended.map(|(name, _)| name.to_owned()).collect()
    }

    /// Lets go of engines that do not end; the process has to.
    pub(crate) fn abandon(&self) {
        for engine in self.take_engines() {
            // Dropping it would wait for its step.
            std::mem::forget(engine);
        }
    }

    fn take_engines(&self) -> Vec<OwnedEngine> {
        let mut residency = self.lock();
        let slots = residency.models.iter_mut();
        let engines = slots.filter_map(|slot| match &mut slot.state {
            State::Loaded(resident) => resident.engine.take(),
            _ => None,
        });
        engines.collect()
    }

    /// Ends all engines, at most after the step that each is in.
    pub(crate) async fn shut_down(&self) {
        let engines = self.take_engines();
        let (tell, ended) = oneshot::channel();
        let end = move || {
            drop(engines);
            // The receiver may be gone.
            let _ = tell.send(());
        };
        let thread = thread::Builder::new().name("ferrum-unload".into());
        // Without a thread they have ended with the closure.
        if thread.spawn(end).is_ok() {
            let _ = ended.await;
        }
    }
}
