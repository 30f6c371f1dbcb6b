//! Pixels to the numbers that a model has learned from: resizing, cropping and normalising, as the image processors of
//! `transformers` do it with Pillow.

use super::resample::{Filter, Window, resample};
use super::{ImageError, RgbImage};

/// What size a picture is brought to before it is cropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// It keeps its own.
    None,
    /// Its shorter side has so many pixels, and the other one keeps the proportion.
    ShortestEdge(usize),
    /// `[height, width]`, whatever the proportion was.
    Exact([usize; 2]),
}

/// What is done to a picture before a model reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageTransform {
    /// Comes first.
    pub resize: Resize,
    /// How it is resized.
    pub filter: Filter,
    /// `[height, width]` of the middle that is kept; what a smaller picture lacks is black.
    pub crop: Option<[usize; 2]>,
    /// What samples from 0 to 255 are multiplied by.
    pub scale: f64,
    /// What is subtracted from each channel then.
    pub mean: [f64; 3],
    /// What each channel is divided by in the end.
    pub std: [f64; 3],
}

/// Where a side of a picture that was resized lies in the result.
struct Span {
    /// First pixel that is taken.
    first: usize,
    /// Pixels that are taken.
    len: usize,
    /// Where they are put.
    at: usize,
}

impl Span {
    /// The middle `crop` pixels of `side`.
    fn middle(side: usize, crop: usize) -> Self {
        match side.checked_sub(crop) {
            Some(more) => Self {
                first: more / 2,
                len: crop,
                at: 0,
            },
            None => Self {
                first: 0,
                len: side,
                at: (crop - side).div_ceil(2),
            },
        }
    }
}

impl ImageTransform {
    /// `[height, width]` after resizing.
    fn resized(&self, image: &RgbImage) -> [usize; 2] {
        let (height, width) = (image.height(), image.width());
        match self.resize {
            Resize::None => [height, width],
            Resize::Exact(size) => size,
            Resize::ShortestEdge(short) => {
                let (least, most) = (height.min(width), height.max(width));
                // `int(short * most / least)`, of 64-bit floats.
                let long = (short as f64 * most as f64 / least as f64) as usize;
                match width <= height {
                    true => [long, short],
                    false => [short, long],
                }
            }
        }
    }

    /// The numbers of a picture, `[3, height, width]` of the size `[height, width]` that a model reads.
    ///
    /// # Errors
    /// [`ImageError::WrongSize`] when the picture does not come out in that size.
    pub fn apply(&self, image: &RgbImage, size: [usize; 2]) -> Result<Vec<f32>, ImageError> {
        let resized = self.resized(image);
        let found = self.crop.unwrap_or(resized);
        if found != size {
            return Err(ImageError::WrongSize {
                found,
                expected: size,
            });
        }
        let [rows, columns] = [0, 1].map(|axis| Span::middle(resized[axis], size[axis]));
        let window = Window {
            left: columns.first,
            top: rows.first,
            width: columns.len,
            height: rows.len,
        };
        let pixels = resample(image, resized, self.filter, window);
        let [height, width] = size;
        let mut values = Vec::with_capacity(3 * height * width);
        for channel in 0..3 {
            let numbers = self.numbers(channel);
            let begin = values.len();
            values.resize(begin + height * width, numbers[0]);
            let plane = values[begin..].chunks_exact_mut(width).skip(rows.at);
            for (y, row) in plane.take(rows.len).enumerate() {
                let samples = pixels.row(y).chunks_exact(3);
                for (value, sample) in row[columns.at..].iter_mut().zip(samples) {
                    *value = numbers[usize::from(sample[channel])];
                }
            }
        }
        Ok(values)
    }

    /// What each of the 256 samples becomes, with the roundings of `transformers`.
    fn numbers(&self, channel: usize) -> [f32; 256] {
        let (mean, std) = (self.mean[channel] as f32, self.std[channel] as f32);
        std::array::from_fn(|sample| ((sample as f64 * self.scale) as f32 - mean) / std)
    }
}
