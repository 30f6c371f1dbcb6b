//! [`VisionTower`]: image files to embeddings, with the preprocessor around an [`ImageEncoder`].

use super::cache::{FileDigest, ImageCache};
use crate::BackendDispatch;
use crate::device::DeviceJob;
use crate::image_embeddings::ImageEmbeddings;
use crate::tasks::TaskModel;
use crate::tasks::classify::preprocessor;
use ferrum_formats::ModelSource;
use ferrum_kernels::{BackendKvDtype, KvF32, LlmBackend};
use ferrum_media::image::{ImageError, ImageLimits, ImageTransform, decode};
use ferrum_models::vision::{ImageEncoder, VisionModel, VisionRunner, VisionSpec, load_vision};
use ferrum_models::{LoadProgress, WeightForm};
use ferrum_types::{Error, Result};
use ring::digest::{SHA256, digest};
use std::ops::ControlFlow;
use std::sync::Arc;

/// An image as its tower reads it.
#[derive(Clone, Debug)]
pub struct ImageTask {
    file: FileDigest,
    /// `[3, side, side]`.
    pixels: Arc<[f32]>,
}

/// What makes pixel values of image files, as the folder of a model says.
#[derive(Clone, Debug)]
pub struct ImagePreprocessor {
    transform: ImageTransform,
    side: usize,
}

impl ImagePreprocessor {
    /// The pixel values of a PNG or JPEG file. They have one size, however large the image is.
    ///
    /// # Errors
    /// [`ImageError`], for whatever bytes.
    pub fn read(
        &self,
        file: &[u8],
        limits: ImageLimits,
    ) -> std::result::Result<ImageTask, ImageError> {
        let image = decode(file, limits)?;
        let pixels = self.transform.apply(&image, [self.side; 2])?;
        let mut name = [0; 32];
        name.copy_from_slice(digest(&SHA256, file).as_ref());
        Ok(ImageTask {
            file: name,
            pixels: pixels.into(),
        })
    }
}

/// The image tower of a decoder on a device, and what is around it.
pub struct VisionTower {
    inner: Box<dyn ImageEncoder>,
    preprocessor: ImagePreprocessor,
    cache: ImageCache,
}

impl VisionTower {
    /// Loads a tower onto a device.
    ///
    /// # Errors
    /// Those of [`load_vision`]; `Model` for a folder without a preprocessor, or with one that does what is not known here.
    pub fn load(
        device: &BackendDispatch,
        model: &VisionModel,
        progress: LoadProgress<'_>,
    ) -> Result<Self> {
        let ModelSource::Hf(folder) = &model.source else {
            return Err(Error::Model("image towers are read from folders".into()));
        };
        let preprocessor = ImagePreprocessor {
            transform: preprocessor::of_vision(folder)?,
            side: model.spec.image.side,
        };
        let load = Load { model, progress };
        let inner = device.with_kv::<KvF32, _>(false, load)?;
        Ok(Self {
            inner,
            preprocessor,
            cache: ImageCache::default(),
        })
    }

    /// What is being run.
    pub fn spec(&self) -> &VisionSpec {
        self.inner.spec()
    }

    /// What makes its tasks.
    pub fn preprocessor(&self) -> &ImagePreprocessor {
        &self.preprocessor
    }

    /// The embeddings of an image; those of a file that was seen lately are the same.
    ///
    /// # Errors
    /// What the device says.
    pub fn embed(&mut self, task: &ImageTask) -> Result<ImageEmbeddings> {
        if let Some(known) = self.cache.get(&task.file) {
            return Ok(known);
        }
        let tokens = self.spec().image_tokens();
        let image = ImageEmbeddings::new(tokens, self.inner.encode(&task.pixels)?);
        self.cache.insert(task.file, image.clone());
        Ok(image)
    }
}

impl TaskModel for VisionTower {
    type Task = ImageTask;
    type Output = ImageEmbeddings;

    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    fn tokens(_: &ImageTask) -> usize {
        1
    }

    fn joins(&self, _: &ImageTask, _: &ImageTask, _: usize) -> bool {
        false
    }

    fn run(
        &mut self,
        tasks: &[ImageTask],
        step: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<ImageEmbeddings>> {
        let mut images = Vec::with_capacity(tasks.len());
        for task in tasks {
            images.push(self.embed(task)?);
            if step().is_break() {
                break;
            }
        }
        Ok(images)
    }
}

/// Loads a tower on whichever device.
struct Load<'a, 'p> {
    model: &'a VisionModel,
    progress: LoadProgress<'p>,
}

impl DeviceJob<KvF32> for Load<'_, '_> {
    type Output = Box<dyn ImageEncoder>;

    fn run<B: LlmBackend + BackendKvDtype<KvF32>, W: WeightForm<B>>(
        self,
        (loading, running): (&B, &B),
    ) -> Result<Self::Output> {
        let weights = load_vision::<B, W>(loading, self.model, self.progress)?;
        let runner = VisionRunner::new(running, self.model.spec.clone(), weights)?;
        Ok(Box::new(runner))
    }
}
