//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them.

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use axum::extract::{Request, State};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Loads an adapter from a folder inside the server's folder of adapters.
pub(crate) async fn load(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<String, ApiError> {
    let (name, dir) = app.read(request, read_load).await?;
    let most = app.config.max_adapters;
    app.model.load_adapter(&name, &dir, most).await?;
    Ok(format!(
        "Success: LoRA adapter '{name}' added successfully."
    ))
}

pub(super) fn read_load(app: &App, mut fields: Fields) -> Result<(String, PathBuf), ApiError> {
    let name = fields.need_text("lora_name")?;
    let path = fields.need_text("lora_path")?;
    fields.harmless("load_inplace", |v| v == false, "false")?;
    fields.text("base_model_name")?;
    fields.finish()?;
    let dir = inside(app.config.lora_dir.as_deref(), &path)?;
    Ok((name, dir))
}

/// Takes an adapter away.
pub(crate) async fn unload(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<String, ApiError> {
    let name = app.read(request, read_unload).await?;
    app.model.adapters.unload(&app.model.served.engine, &name)?;
    Ok(format!(
        "Success: LoRA adapter '{name}' removed successfully."
    ))
}

pub(super) fn read_unload(_: &App, mut fields: Fields) -> Result<String, ApiError> {
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
