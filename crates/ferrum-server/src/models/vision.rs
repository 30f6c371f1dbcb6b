//! The image tower of a loaded model.

use ferrum_engine::vision::{ImagePreprocessor, ImagePrompt, VisionTower};
use ferrum_engine::{TaskEngine, TaskHandle, TaskMonitor};

/// The image tower of a model that is loaded.
pub struct ServedVision {
    /// Computes images until the model is unloaded.
    owner: Option<TaskEngine<VisionTower>>,
    pub(crate) engine: TaskHandle<VisionTower>,
    pub(crate) preprocessor: ImagePreprocessor,
    pub(crate) prompt: ImagePrompt,
}

impl std::fmt::Debug for ServedVision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedVision").finish_non_exhaustive()
    }
}

impl ServedVision {
    /// A tower that runs, with what makes its tasks, and what images are in prompts.
    pub fn new(
        engine: TaskEngine<VisionTower>,
        preprocessor: ImagePreprocessor,
        prompt: ImagePrompt,
    ) -> Self {
        Self {
            engine: engine.handle(),
            owner: Some(engine),
            preprocessor,
            prompt,
        }
    }

    /// Embeddings of an image, all of which are in one step.
    pub fn image_tokens(&self) -> usize {
        self.prompt.image_tokens()
    }

    /// Monitors the tower.
    pub(crate) fn monitor(&self) -> TaskMonitor {
        self.engine.monitor().clone()
    }

    /// Takes the engine, which is shut down with the model.
    pub(crate) fn take_owner(&mut self) -> Option<TaskEngine<VisionTower>> {
        self.owner.take()
    }
}
