//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`.

use super::Anything;
use serde::Deserialize;
use utoipa::ToSchema;

/// `/v1/load_lora_adapter`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct LoadAdapter {
    pub(crate) lora_name: String,
    /// A folder inside the server's.
    pub(crate) lora_path: String,
    pub(crate) base_model_name: Option<String>,
    /// Whether an adapter of the name is replaced, which is not supported.
    pub(crate) load_inplace: Option<bool>,
}

/// `/v1/unload_lora_adapter`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct UnloadAdapter {
    pub(crate) lora_name: String,
    #[serde(rename = "lora_int_id")]
    _lora_int_id: Option<Anything>,
}
