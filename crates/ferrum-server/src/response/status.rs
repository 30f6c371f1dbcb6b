//! Health, models, slots and what else there is to look at.

use super::SamplerSettings;
use serde::Serialize;
use utoipa::ToSchema;

literals! {
    Ready = "ready";
    ListObject = "list";
    ModelObject = "model";
}

/// How the engines do.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct HealthReport {
    pub(crate) status: HealthStatus,
    /// Requests in a row whose numbers were none, where it is `degraded`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) nan_failures: Option<u64>,
    /// Of the engine that made one last.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) seconds_since_step: Option<f64>,
    /// For a step, where it is `stalled`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) seconds_waited: Option<f64>,
    /// Whose engine it is, where one is not well.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) model: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum HealthStatus {
    #[default]
    Ok,
    Degraded,
    Stalled,
    Failed,
    Stopped,
}

/// Requests are taken.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Readiness {
    #[schema(inline)]
    pub(crate) status: Ready,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Version {
    pub(crate) version: &'static str,
}

/// The first model, as llama.cpp tells it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Props<'a> {
    pub(crate) default_generation_settings: DefaultSettings,
    pub(crate) total_slots: usize,
    pub(crate) model_alias: &'a str,
    pub(crate) chat_template: &'a str,
    /// Empty without one, like the next.
    pub(crate) bos_token: String,
    pub(crate) eos_token: String,
    pub(crate) modalities: Modalities,
    pub(crate) build_info: &'static str,
    pub(crate) is_sleeping: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DefaultSettings {
    pub(crate) n_ctx: usize,
    pub(crate) params: DefaultParams,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DefaultParams {
    #[serde(flatten)]
    pub(crate) samplers: DefaultSamplers,
    /// -1: as many as fit.
    pub(crate) n_predict: i64,
}

/// The samplers that hold where a request names none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct DefaultSamplers {
    pub(crate) temperature: f64,
    pub(crate) top_p: f64,
    pub(crate) top_k: usize,
    pub(crate) min_p: f64,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Modalities {
    pub(crate) vision: bool,
    pub(crate) audio: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    #[schema(inline)]
    pub(crate) object: ListObject,
    pub(crate) data: Vec<ModelCard>,
}

/// A model, an adapter or a further name.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCard {
    pub(crate) id: String,
    #[schema(inline)]
    pub(crate) object: ModelObject,
    pub(crate) created: u64,
    pub(crate) owned_by: &'static str,
    /// Null before the model is loaded for the first time.
    #[schema(required)]
    pub(crate) max_model_len: Option<usize>,
    pub(crate) status: ModelStatus,
    /// What this server says beyond OpenAI's fields.
    pub(crate) ferrum: ModelExtras,
    /// Of an adapter: its model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) parent: Option<String>,
    /// Of an adapter: its folder; of a further name: the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) root: Option<String>,
}

/// Where a model is in its life, in the form that llama.cpp's router has for it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelStatus {
    pub(crate) value: ModelState,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ModelState {
    Unloaded,
    Loading,
    Loaded,
    Unloading,
    Failed,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelExtras {
    /// `decoder`, `encoder` or `speech`; null before the model is loaded for the first time.
    #[schema(required)]
    pub(crate) kind: Option<&'static str>,
    /// Null before the model is loaded for the first time, and of models that generate nothing.
    #[schema(required)]
    pub(crate) defaults: Option<DefaultSamplers>,
}

/// One of as many places as a model answers at a time.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Slot {
    pub(crate) id: usize,
    pub(crate) n_ctx: usize,
    pub(crate) speculative: bool,
    pub(crate) is_processing: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) id_task: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) params: Option<SlotSettings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) next_token: Option<SlotProgress>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct SlotSettings {
    #[serde(flatten)]
    pub(crate) samplers: SamplerSettings,
    pub(crate) n_predict: usize,
    pub(crate) max_tokens: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SlotProgress {
    pub(crate) has_next_token: bool,
    pub(crate) has_new_line: bool,
    pub(crate) n_remain: usize,
    pub(crate) n_decoded: usize,
}
