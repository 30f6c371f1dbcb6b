//! The LoRA adapters of a model, which requests choose by name as if they were models.

use crate::error::ApiError;
use crate::model::unix_time;
use ferrum_engine::EngineHandle;
use ferrum_formats::LoraFolder;
use ferrum_types::AdapterId;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Longest name of an adapter, in bytes.
const MAX_NAME: usize = 256;

/// An adapter that requests can name.
#[derive(Clone, Debug)]
pub(crate) struct Adapter {
    pub(crate) id: AdapterId,
    /// Where it was loaded from.
    pub(crate) root: PathBuf,
    pub(crate) created: u64,
}

/// The adapters by name; `None` while one is being loaded.
#[derive(Debug, Default)]
pub(crate) struct Adapters(Mutex<BTreeMap<String, Option<Adapter>>>);

impl Adapters {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Option<Adapter>>> {
        // Nothing panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Loads the adapter in `dir` under `name`, which must be new.
    ///
    /// # Errors
    /// 400 for the name, for one too many, and for an adapter that cannot be used.
    pub(crate) async fn load(
        &self,
        engine: &EngineHandle,
        name: &str,
        dir: &Path,
        most: usize,
    ) -> Result<(), ApiError> {
        let place = Place::take(self, name, most)?;
        let root = dir.to_owned();
        let open = {
            let root = root.clone();
            tokio::task::spawn_blocking(move || LoraFolder::open(root))
        };
        let wrong = |reason: String| ApiError::invalid("lora_path", reason);
        let open = open
            .await
            .map_err(|_| ApiError::internal("the adapter could not be read"))?;
        let folder = open.map_err(|e| wrong(e.to_string()))?;
        let id = engine.load_adapter(folder).await.map_err(|e| match e {
            ferrum_engine::EngineError::Invalid { reason, .. } => wrong(reason),
            other => other.into(),
        })?;
        place.fill(Adapter {
            id,
            root,
            created: unix_time(),
        });
        Ok(())
    }

    /// Takes an adapter away; answers that have begun with it go on.
    ///
    /// # Errors
    /// 404 when there is none of that name.
    pub(crate) fn unload(&self, engine: &EngineHandle, name: &str) -> Result<(), ApiError> {
        let mut all = self.all();
        let Some(adapter) = all.get(name).cloned().flatten() else {
            return Err(ApiError::no_adapter(name));
        };
        all.remove(name);
        engine.unload_adapter(adapter.id);
        Ok(())
    }
}

/// A name that is taken while its adapter is loaded, and free again if that comes to nothing.
struct Place<'a> {
    adapters: &'a Adapters,
    name: &'a str,
}

impl<'a> Place<'a> {
    fn take(adapters: &'a Adapters, name: &'a str, most: usize) -> Result<Self, ApiError> {
        let fail = |reason: String| Err(ApiError::invalid("lora_name", reason));
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return fail(format!("expected 1 to {MAX_NAME} bytes of plain text"));
        }
        let mut all = adapters.all();
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
        Ok(Self { adapters, name })
    }

    fn fill(self, adapter: Adapter) {
        self.adapters
            .all()
            .insert(self.name.to_owned(), Some(adapter));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut all = self.adapters.all();
        if all.get(self.name).is_some_and(Option::is_none) {
            all.remove(self.name);
        }
    }
}
