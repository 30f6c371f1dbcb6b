//! LoRA adapters, which requests choose by name as if they were models.
//!
//! Their names belong to the server, so they stay when a model is unloaded; what an engine has of them goes
//! with it, and is loaded again from the same folder when it is asked for.

use crate::error::ApiError;
use crate::ids::unix_time;
use ferrum_engine::{EngineError, EngineHandle};
use ferrum_formats::LoraFolder;
use ferrum_types::AdapterId;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Longest name of an adapter, in bytes.
const MAX_NAME: usize = 256;

/// An adapter that requests can name.
#[derive(Clone, Debug)]
pub(crate) struct Adapter {
    /// No other adapter has it, not even a later one of the same name.
    pub(crate) key: u64,
    /// Number of its model.
    pub(crate) model: usize,
    /// Where it was loaded from.
    pub(crate) root: PathBuf,
    pub(crate) created: u64,
    /// Whether it was given when the server started.
    given: bool,
}

/// The adapters by name; `None` while one is being loaded.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    by_name: Mutex<BTreeMap<String, Option<Adapter>>>,
    keys: AtomicU64,
}

impl Adapters {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Option<Adapter>>> {
        // Nothing panics while it holds the lock.
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, name: &str) -> Option<Adapter> {
        self.all().get(name).cloned().flatten()
    }

    /// Those that can be used, by name.
    pub(crate) fn list(&self) -> Vec<(String, Adapter)> {
        let all = self.all();
        let ready = all.iter().filter_map(|(name, adapter)| {
            let adapter = adapter.as_ref()?;
            Some((name.clone(), adapter.clone()))
        });
        ready.collect()
    }

    /// Takes a name, which must be new, for one of at most `most` adapters.
    ///
    /// # Errors
    /// 400 for the name, and for one too many.
    pub(crate) fn take<'a>(
        &'a self,
        name: &'a str,
        most: usize,
    ) -> Result<ReservedName<'a>, ApiError> {
        let fail = |reason: String| Err(ApiError::invalid("lora_name", reason));
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return fail(format!("expected 1 to {MAX_NAME} bytes of plain text"));
        }
        let mut all = self.all();
        if all.contains_key(name) {
            return fail(format!(
                "there is an adapter {name:?} already; unload it first"
            ));
        }
        if all.len() >= most {
            return fail(format!(
                "there are {most} adapters already; unload one first"
            ));
        }
        all.insert(name.to_owned(), None);
        Ok(ReservedName {
            adapters: self,
            name,
            key: self.keys.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Forgets an adapter; one that was given at the start only with `given_too`.
    ///
    /// # Errors
    /// 404 when there is none of that name, 403 when it has to stay.
    pub(crate) fn remove(&self, name: &str, given_too: bool) -> Result<Adapter, ApiError> {
        let mut all = self.all();
        let Some(adapter) = all.get(name).cloned().flatten() else {
            return Err(ApiError::no_adapter(name));
        };
        if adapter.given && !given_too {
            let message = format!(
                "lora_name: {name:?} was given at the start; unloading it needs the key of an administrator, \
                 and this server has none"
            );
            return Err(ApiError::forbidden(message));
        }
        all.remove(name);
        Ok(adapter)
    }
}

/// A name that is taken while its adapter is loaded, and free again if that comes to nothing.
pub(crate) struct ReservedName<'a> {
    adapters: &'a Adapters,
    name: &'a str,
    key: u64,
}

impl ReservedName<'_> {
    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    pub(crate) fn fill(self, model: usize, root: &Path, given: bool) {
        let adapter = Adapter {
            key: self.key,
            model,
            root: root.to_owned(),
            created: unix_time(),
            given,
        };
        self.adapters
            .all()
            .insert(self.name.to_owned(), Some(adapter));
    }
}

impl Drop for ReservedName<'_> {
    fn drop(&mut self) {
        let mut all = self.adapters.all();
        if all.get(self.name).is_some_and(Option::is_none) {
            all.remove(self.name);
        }
    }
}

/// Adapters in an engine, by their keys.
#[derive(Debug, Default)]
pub(crate) struct LoadedAdapters {
    ids: Mutex<BTreeMap<u64, AdapterId>>,
    /// Held while one is loaded, so that who waits for the same finds it.
    loading: tokio::sync::Mutex<()>,
}

impl LoadedAdapters {
    fn ids(&self) -> MutexGuard<'_, BTreeMap<u64, AdapterId>> {
        // Nothing panics while it holds the lock.
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, key: u64) -> Option<AdapterId> {
        self.ids().get(&key).copied()
    }

    pub(crate) fn insert(&self, key: u64, id: AdapterId) {
        self.ids().insert(key, id);
    }

    /// The number of an adapter in the engine, into which it is loaded if it is not there.
    ///
    /// # Errors
    /// Those of [`load`].
    pub(crate) async fn get_or_load(
        &self,
        engine: &EngineHandle,
        adapter: &Adapter,
    ) -> Result<AdapterId, ApiError> {
        if let Some(id) = self.get(adapter.key) {
            return Ok(id);
        }
        let _loading = self.loading.lock().await;
        if let Some(id) = self.get(adapter.key) {
            return Ok(id);
        }
        let id = load(engine, &adapter.root).await?;
        self.insert(adapter.key, id);
        Ok(id)
    }

    /// Takes an adapter out of the engine, if it is there.
    pub(crate) fn unload(&self, engine: &EngineHandle, key: u64) {
        if let Some(id) = self.ids().remove(&key) {
            engine.unload_adapter(id);
        }
    }
}

/// Reads the folder of an adapter, without its weights.
///
/// # Errors
/// 400 when it is none.
pub(crate) async fn open(dir: &Path) -> Result<LoraFolder, ApiError> {
    let root = dir.to_owned();
    let open = tokio::task::spawn_blocking(move || LoraFolder::open(root));
    let open = open
        .await
        .map_err(|_| ApiError::internal("the adapter could not be read"))?;
    open.map_err(|e| wrong(&e.to_string()))
}

/// Loads the adapter of a folder into an engine.
///
/// # Errors
/// 400 for an adapter that cannot be used; what the engine says that takes nothing more.
pub(crate) async fn load(engine: &EngineHandle, dir: &Path) -> Result<AdapterId, ApiError> {
    let folder = open(dir).await?;
    engine.load_adapter(folder).await.map_err(|e| match e {
        EngineError::Invalid { reason, .. } => wrong(&reason),
        other => other.into(),
    })
}

fn wrong(reason: &str) -> ApiError {
    ApiError::invalid("lora_path", reason)
}
