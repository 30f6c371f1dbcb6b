//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them.

use crate::app::{App, blocking};
use crate::error::ApiError;
use crate::fields::Fields;
use axum::extract::{Request, State};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An adapter that is to be loaded.
pub(super) struct NewAdapter {
    name: String,
    dir: PathBuf,
    /// The model that it is for, if the request says.
    base: Option<String>,
}

/// Loads an adapter from a folder inside the server's folder of adapters.
pub(crate) async fn load(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<String, ApiError> {
    let fields = app.fields(request).await?;
    let reader = Arc::clone(&app);
    let NewAdapter { name, dir, base } = blocking(move || read_load(&reader, fields)).await?;
    let loaded = app.models.load_adapter(&name, &dir, base.as_deref());
    loaded.await?;
    Ok(format!(
        "Success: LoRA adapter '{name}' added successfully."
    ))
}

pub(super) fn read_load(app: &App, mut fields: Fields) -> Result<NewAdapter, ApiError> {
    let name = fields.need_text("lora_name")?;
    let path = fields.need_text("lora_path")?;
    fields.harmless("load_inplace", |v| v == false, "false")?;
    let base = fields.text("base_model_name")?;
    fields.finish()?;
    let dir = inside(app.config.lora_dir.as_deref(), &path)?;
    Ok(NewAdapter { name, dir, base })
}

/// Takes an adapter away.
pub(crate) async fn unload(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<String, ApiError> {
    let name = read_unload(app.fields(request).await?)?;
    // With keys of administrators, only they come here.
    let all = !app.config.admin_keys.is_empty();
    app.models.unload_adapter(&name, all)?;
    Ok(format!(
        "Success: LoRA adapter '{name}' removed successfully."
    ))
}

pub(super) fn read_unload(mut fields: Fields) -> Result<String, ApiError> {
    let name = fields.need_text("lora_name")?;
    fields.int("lora_int_id", 0..=i64::MAX)?;
    fields.finish()?;
    Ok(name)
}

/// The folder that a request names. Whoever may ask for adapters may not look around on this machine,
/// so all that is outside is as good as absent.
fn inside(lora_dir: Option<&Path>, path: &str) -> Result<PathBuf, ApiError> {
    let Some(lora_dir) = lora_dir else {
        let reason = "this server loads no adapters by request; start it with --lora-dir DIR";
        return Err(ApiError::unsupported("lora_path", reason));
    };
    let found = lora_dir
        .canonicalize()
        .and_then(|root| Ok((root.join(path).canonicalize()?, root)));
    match found {
        Ok((dir, root)) if dir.starts_with(&root) && dir.is_dir() => Ok(dir),
        _ => {
            let reason = "there is no such folder in the server's --lora-dir";
            Err(ApiError::invalid("lora_path", reason))
        }
    }
}
