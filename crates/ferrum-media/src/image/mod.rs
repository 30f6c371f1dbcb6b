//! Pictures: from a PNG or JPEG file to the pixel values that an image encoder reads.

mod decode;
mod orientation;
mod resample;
mod transform;

pub use decode::{ImageError, ImageLimits, decode};
pub use resample::{Filter, Window, resample};
pub use transform::{ImageTransform, Resize};

/// A picture of eight bits for each of red, green and blue.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    width: usize,
    height: usize,
    /// `[height, width, 3]`.
    pixels: Vec<u8>,
}

impl RgbImage {
    /// A picture of these pixels, `[height, width, 3]`; `None` for another number of them, or none.
    pub fn new(width: usize, height: usize, pixels: Vec<u8>) -> Option<Self> {
        let len = width.checked_mul(height)?.checked_mul(3)?;
        (len > 0 && len == pixels.len()).then_some(Self {
            width,
            height,
            pixels,
        })
    }

    /// Pixels of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// `[height, width, 3]`.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    fn row(&self, y: usize) -> &[u8] {
        let len = 3 * self.width;
        &self.pixels[y * len..][..len]
    }
}

impl std::fmt::Debug for RgbImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RgbImage")
            .field("width", &self.width)
            .field("height", &self.height)
            .finish_non_exhaustive()
    }
}
