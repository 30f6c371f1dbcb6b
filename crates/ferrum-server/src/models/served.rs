//! Kinds of loaded models and their common monitoring interface.

use crate::models::info::{ModelInfo, ModelKind};
use crate::models::model::{Model, ServedModel};
use crate::models::vision::ServedVision;
use ferrum_engine::engine::{EmbeddingPrompts, EngineStats, Pooling};
use ferrum_engine::transcribe::Transcriber;
use ferrum_engine::vision::VisionTower;
use ferrum_engine::{
    Encoder, EncoderTokenizer, Engine, EngineHandle, Health, TaskEngine, TaskHandle, TaskMonitor,
};
use std::sync::Arc;

/// A loaded text encoder.
#[derive(Debug)]
pub struct ServedEncoder {
    /// Runs it.
    pub engine: TaskHandle<Encoder>,
    /// Text to tokens.
    pub tokenizer: Arc<EncoderTokenizer>,
    /// How the vectors of a text's tokens become one; `None` where the model's files ask for a way that is not known
    /// here.
    pub pooling: Option<Pooling>,
    /// What it may be given before texts that become embeddings.
    pub prompts: EmbeddingPrompts,
    /// Elements of an embedding.
    pub embedding_size: usize,
    /// Logits of a pair of texts; 0: it has no classifier, 1: it is a reranker.
    pub labels: usize,
}

/// A loaded model that transcribes speech.
#[derive(Debug)]
pub struct ServedTranscriber {
    /// Runs it.
    pub engine: TaskHandle<Transcriber>,
    /// Codes of the languages that it knows; none for a model of one language.
    pub languages: Vec<String>,
}

/// A model with the engine that runs it, which is shut down when the model is unloaded. What requests see of the model has
/// a handle of that engine.
pub enum LoadedModel {
    /// Generates text.
    Decoder(Engine, Box<ServedModel>),
    /// Makes vectors and scores of texts.
    Encoder(TaskEngine<Encoder>, ServedEncoder),
    /// Transcribes speech.
    Transcriber(TaskEngine<Transcriber>, ServedTranscriber),
}

impl LoadedModel {
    /// The model that generates, for tests that know that it does.
    #[cfg(test)]
    pub(crate) fn decoder(self) -> ServedModel {
        match self {
            Self::Decoder(_, model) => *model,
            _ => unreachable!("the test has a decoder"),
        }
    }

    pub(crate) fn split(self) -> (OwnedEngine, LoadedHandle) {
        match self {
            Self::Decoder(engine, mut model) => {
                let vision = model.vision.as_mut().and_then(ServedVision::take_owner);
                let model = LoadedHandle::Decoder(Arc::new(Model::new(*model)));
                (OwnedEngine::Decoder(engine, vision), model)
            }
            Self::Encoder(engine, model) => {
                let model = LoadedHandle::Encoder(Arc::new(model));
                (OwnedEngine::Encoder(engine), model)
            }
            Self::Transcriber(engine, model) => {
                let model = LoadedHandle::Transcriber(Arc::new(model));
                (OwnedEngine::Transcriber(engine), model)
            }
        }
    }
}

/// The engines that are shut down when a model is unloaded.
#[expect(dead_code, reason = "dropping it shuts it down")]
pub(crate) enum OwnedEngine {
    Decoder(Engine, Option<TaskEngine<VisionTower>>),
    Encoder(TaskEngine<Encoder>),
    Transcriber(TaskEngine<Transcriber>),
}

/// A loaded model of any kind.
#[derive(Clone, Debug)]
pub(crate) enum LoadedHandle {
    Decoder(Arc<Model>),
    Encoder(Arc<ServedEncoder>),
    Transcriber(Arc<ServedTranscriber>),
}

impl LoadedHandle {
    pub(crate) fn decoder(&self) -> Option<&Arc<Model>> {
        match self {
            Self::Decoder(model) => Some(model),
            Self::Encoder(_) | Self::Transcriber(_) => None,
        }
    }

    /// The monitor of its engine.
    pub(crate) fn monitor(&self) -> EngineMonitor {
        match self {
            Self::Decoder(model) => {
                let vision = model.served.vision.as_ref().map(ServedVision::monitor);
                EngineMonitor::Steps(model.served.engine.clone(), vision)
            }
            Self::Encoder(model) => {
                let engine = model.engine.clone();
                EngineMonitor::Tasks(engine.monitor().clone(), Arc::new(move || engine.drain()))
            }
            Self::Transcriber(model) => {
                let engine = model.engine.clone();
                EngineMonitor::Tasks(engine.monitor().clone(), Arc::new(move || engine.drain()))
            }
        }
    }

    /// Sizes and defaults, known once it is loaded.
    pub(crate) fn info(&self) -> ModelInfo {
        match self {
            Self::Decoder(model) => model.info(),
            Self::Encoder(model) => ModelInfo {
                kind: ModelKind::Encoder,
                context: Some(model.tokenizer.max_tokens()),
                kv_tokens: None,
                defaults: None,
            },
            Self::Transcriber(_) => ModelInfo {
                kind: ModelKind::Transcriber,
                context: None,
                kv_tokens: None,
                defaults: None,
            },
        }
    }
}

/// Health, failure and statistics of an engine of any kind.
#[derive(Clone)]
pub(crate) enum EngineMonitor {
    /// The engine, and the monitor of its vision encoder.
    Steps(EngineHandle, Option<TaskMonitor>),
    /// The monitor, and the function that drains the engine.
    Tasks(TaskMonitor, Arc<dyn Fn() + Send + Sync>),
}

impl EngineMonitor {
    pub(crate) fn health(&self) -> Health {
        match self {
            Self::Steps(engine, vision) => match (engine.health(), vision) {
                (alive @ Health::Alive { .. }, Some(vision)) => match vision.health() {
                    Health::Alive { .. } => alive,
                    other => other,
                },
                (health, _) => health,
            },
            Self::Tasks(engine, _) => engine.health(),
        }
    }

    pub(crate) fn failure(&self) -> Option<String> {
        match self {
            Self::Steps(engine, vision) => {
                let failure = || vision.as_ref().and_then(TaskMonitor::failure);
                engine.failure().or_else(failure)
            }
            Self::Tasks(engine, _) => engine.failure(),
        }
    }

    pub(crate) fn stats(&self) -> EngineStats {
        match self {
            Self::Steps(engine, _) => engine.stats(),
            Self::Tasks(engine, _) => engine.stats(),
        }
    }

    pub(crate) fn drain(&self) {
        match self {
            Self::Steps(engine, _) => engine.drain(),
            Self::Tasks(_, drain) => drain(),
        }
    }

    /// Waits until it has ended, for whatever reason.
    pub(crate) async fn stopped(&self) {
        match self {
            Self::Steps(engine, _) => engine.stopped().await,
            Self::Tasks(engine, _) => engine.stopped().await,
        }
    }
}
