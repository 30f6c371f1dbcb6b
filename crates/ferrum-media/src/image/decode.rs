//! Image files to RGB pixels: PNG by the `png` crate, JPEG by `zune-jpeg`.

use super::RgbImage;
use super::orientation::{Orientation, upright};
use png::{ColorType, Transformations};
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// The largest image that is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// Pixels of a row or a column.
    pub side: usize,
    /// Pixels in all.
    pub pixels: usize,
}

impl Default for ImageLimits {
    /// 100 million pixels, which take 0.3 GiB, and the longest side that a JPEG file can have.
    fn default() -> Self {
        Self {
            side: 65_535,
            pixels: 100_000_000,
        }
    }
}

impl ImageLimits {
    fn check(self, width: usize, height: usize) -> Result<(), ImageError> {
        let Self { side, pixels } = self;
        let fits = width <= side && height <= side && width.saturating_mul(height) <= pixels;
        match fits {
            true => Ok(()),
            false => Err(ImageError::TooLarge {
                width,
                height,
                side,
                pixels,
            }),
        }
    }
}

/// Why a file gives no pixels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// It begins like no known format.
    #[error("the file is not an image that is supported: expected PNG or JPEG")]
    UnknownFormat,
    /// It is damaged, or uses what its decoder does not know.
    #[error("the {format} image cannot be decoded: {reason}")]
    Damaged {
        /// PNG or JPEG.
        format: &'static str,
        /// What its decoder says.
        reason: String,
    },
    /// It is larger than the limits allow.
    #[error(
        "the image has {width} x {height} pixels, expected at most {pixels} in all and {side} on a side"
    )]
    TooLarge {
        /// Pixels of a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Most pixels of a side.
        side: usize,
        /// Most pixels in all.
        pixels: usize,
    },
    /// It does not come out in the size that a model reads.
    #[error(
        "the preprocessor gives {} x {} pixels (height x width), the model reads {} x {}",
        .found[0], .found[1], .expected[0], .expected[1]
    )]
    WrongSize {
        /// Height and width.
        found: [usize; 2],
        /// Height and width.
        expected: [usize; 2],
    },
}

/// Decodes a PNG or JPEG file to RGB, turned upright where its EXIF data says how it is held.
///
/// Like `Image.convert("RGB")` of Pillow, this drops alpha and repeats greys; palettes are expanded. Of samples with 16
/// bits the upper eight are kept. Of an animation this is the first frame.
///
/// # Errors
/// [`ImageError`], for whatever bytes. Dimensions are checked against `limits` before memory is taken for pixels.
pub fn decode(bytes: &[u8], limits: ImageLimits) -> Result<RgbImage, ImageError> {
    type Read = fn(&[u8], ImageLimits) -> Result<RgbImage, ImageError>;
    let (format, read): (_, Read) = match bytes {
        [0x89, b'P', b'N', b'G', ..] => ("PNG", read_png),
        [0xff, 0xd8, 0xff, ..] => ("JPEG", read_jpeg),
        _ => return Err(ImageError::UnknownFormat),
    };
    // The decoders are not ours, and the bytes are anybody's.
    let decoded = catch_unwind(AssertUnwindSafe(|| read(bytes, limits)));
    decoded.unwrap_or_else(|_| Err(damaged(format, "its parts contradict each other")))
}

fn damaged(format: &'static str, reason: impl ToString) -> ImageError {
    ImageError::Damaged {
        format,
        reason: reason.to_string().trim().to_owned(),
    }
}

fn read_png(bytes: &[u8], limits: ImageLimits) -> Result<RgbImage, ImageError> {
    let fail = |e: png::DecodingError| damaged("PNG", e);
    // What is not pixels (profiles, texts) gets no more than the pixels may.
    let memory = png::Limits {
        bytes: limits.pixels.saturating_mul(8),
    };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), memory);
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let header = decoder.read_header_info().map_err(fail)?;
    limits.check(header.width as usize, header.height as usize)?;
    let mut reader = decoder.read_info().map_err(fail)?;
    let size = reader.output_buffer_size();
    let size = size.ok_or_else(|| damaged("PNG", "its size overflows"))?;
    let mut samples = vec![0; size];
    let frame = reader.next_frame(&mut samples).map_err(fail)?;
    samples.truncate(frame.buffer_size());
    let orientation = reader.info().exif_metadata.as_deref();
    let orientation = orientation.map_or(Orientation::UPRIGHT, Orientation::of_exif);
    let grey = |pixels: &[u8], channels: usize| {
        let greys = pixels.iter().step_by(channels);
        greys.flat_map(|&grey| [grey; 3]).collect()
    };
    let pixels = match frame.color_type {
        ColorType::Rgb => samples,
        ColorType::Rgba => {
            let colours = samples.chunks_exact(4);
            colours
                .flat_map(|pixel| [pixel[0], pixel[1], pixel[2]])
                .collect()
        }
        ColorType::Grayscale => grey(&samples, 1),
        ColorType::GrayscaleAlpha => grey(&samples, 2),
        ColorType::Indexed => return Err(damaged("PNG", "its palette was not expanded")),
    };
    let image = RgbImage::new(frame.width as usize, frame.height as usize, pixels);
    let image =
        image.ok_or_else(|| damaged("PNG", "it has another number of pixels than it says"))?;
    Ok(upright(image, orientation))
}

fn read_jpeg(bytes: &[u8], limits: ImageLimits) -> Result<RgbImage, ImageError> {
    let options = DecoderOptions::default()
        .set_max_width(limits.side)
        .set_max_height(limits.side)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let fail = |e: zune_jpeg::errors::DecodeErrors| damaged("JPEG", e);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(fail)?;
    let info = decoder.info();
    let info = info.ok_or_else(|| damaged("JPEG", "it has no dimensions"))?;
    let (width, height) = (usize::from(info.width), usize::from(info.height));
    limits.check(width, height)?;
    let pixels = decoder.decode().map_err(fail)?;
    // The decoder gives what a file lacks as grey.
    if !has_jpeg_end(bytes) {
        return Err(damaged("JPEG", "it ends too early"));
    }
    let orientation = decoder.exif();
    let orientation = orientation.map_or(Orientation::UPRIGHT, |exif| Orientation::of_exif(exif));
    let image = RgbImage::new(width, height, pixels);
    let image = image.ok_or_else(|| damaged("JPEG", "it has other colours than it says"))?;
    Ok(upright(image, orientation))
}

/// Whether a JPEG file comes to its marker of the end (ITU T.81, B.1.1): one in a thumbnail, which is inside of a segment, is none.
fn has_jpeg_end(bytes: &[u8]) -> bool {
    const END: u8 = 0xd9;
    let mut rest = bytes;
    // Between segments are the bytes of scans.
    while let Some(at) = rest.iter().position(|&byte| byte == 0xff) {
        rest = &rest[at + 1..];
        let Some(&marker) = rest.first() else {
            return false;
        };
        let skipped = match marker {
            END => return true,
            // A fill byte, which may be the first of a marker.
            0xff => 0,
            // A byte of a scan, markers inside of scans, and the one of the beginning, which have no length.
            0x00 | 0x01 | 0xd0..=0xd8 => 1,
            _ => match rest {
                [_, high, low, ..] => 1 + usize::from(u16::from_be_bytes([*high, *low])),
                _ => return false,
            },
        };
        rest = rest.get(skipped..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_jpeg_is_not_that_of_its_thumbnail() {
        let start = [0xff, 0xd8];
        let thumbnail = [0xff, 0xe1, 0, 6, 0xff, 0xd8, 0xff, 0xd9];
        let scan = [0xff, 0xda, 0, 2, 7, 0xff, 0, 0xff, 0xd0, 9];
        let whole = [&start[..], &thumbnail, &scan, &[0xff, 0xff, 0xd9]].concat();
        assert!(has_jpeg_end(&whole));
        for len in 0..whole.len() {
            assert!(!has_jpeg_end(&whole[..len]), "{len}");
        }
    }

    /// A PNG header of any size, with no pixels behind it.
    fn png_header(width: u32, height: u32) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(ColorType::Rgb);
        let writer = encoder.write_header().expect("a header");
        // It would write an end.
        std::mem::forget(writer);
        file
    }

    #[test]
    fn dimensions_are_checked_before_pixels_are_read() {
        for (width, height) in [
            (65_536, 1),
            (1, 65_536),
            (60_000, 60_000),
            (1 << 30, 1 << 30),
        ] {
            let found = decode(&png_header(width, height), ImageLimits::default());
            let error = ImageError::TooLarge {
                width: width as usize,
                height: height as usize,
                side: 65_535,
                pixels: 100_000_000,
            };
            assert_eq!(found, Err(error));
        }
    }

    #[test]
    fn what_is_no_image_is_told() {
        for bytes in [&b""[..], b"GIF89a", b"\x89PN", b"no image at all"] {
            let found = decode(bytes, ImageLimits::default());
            assert_eq!(found, Err(ImageError::UnknownFormat));
        }
        for bytes in [&b"\x89PNG"[..], b"\xff\xd8\xff", &png_header(4, 4)[..]] {
            let found = decode(bytes, ImageLimits::default());
            assert!(
                matches!(found, Err(ImageError::Damaged { .. })),
                "{found:?}"
            );
        }
    }
}
