//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them.

use crate::error::ApiError;
use crate::http::app::App;
use crate::request::{self, Body};
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
    let reader = Arc::clone(&app);
    let read = move |body: &mut Body| read_load(&reader, body);
    let NewAdapter { name, dir, base } = app.read_plain(request, read).await?;
    let loaded = app.models.load_adapter(&name, &dir, base.as_deref());
    loaded.await?;
    Ok(format!(
        "Success: LoRA adapter '{name}' added successfully."
    ))
}

pub(super) fn read_load(app: &App, body: &mut Body) -> Result<NewAdapter, ApiError> {
    let fields: request::LoadAdapter = body.part()?;
    if fields.load_inplace == Some(true) {
        let reason = "not supported; expected false or no such field";
        return Err(ApiError::unsupported("load_inplace", reason));
    }
    Ok(NewAdapter {
        dir: inside(app.config.lora_dir.as_deref(), &fields.lora_path)?,
        name: fields.lora_name,
        base: fields.base_model_name,
    })
}

/// Takes an adapter away.
pub(crate) async fn unload(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<String, ApiError> {
    let fields: request::UnloadAdapter = app.read_plain(request, |body| body.part()).await?;
    let name = fields.lora_name;
    // With keys of administrators, only they come here.
    let all = !app.config.admin_keys.is_empty();
    app.models.unload_adapter(&name, all)?;
    Ok(format!(
        "Success: LoRA adapter '{name}' removed successfully."
    ))
}

/// The folder that a request names. A client must not learn of other files on this machine, so a path outside of the
/// folder of adapters is an unknown one.
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
