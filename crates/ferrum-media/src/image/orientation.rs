//! EXIF orientation (CIPA DC-008, tag 274), which decoders leave to their caller.

use super::RgbImage;

/// What has to be done to a picture for its top to be up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Orientation {
    /// Rows and columns change places. Comes first.
    transpose: bool,
    /// Columns are read from the right, of the result.
    mirror: bool,
    /// Rows are read from below, of the result.
    flip: bool,
}

const TAG: u16 = 274;

impl Orientation {
    pub(super) const UPRIGHT: Self = Self {
        transpose: false,
        mirror: false,
        flip: false,
    };

    /// That of EXIF data, which are a TIFF file; upright where they say nothing that can be read.
    pub(super) fn of_exif(exif: &[u8]) -> Self {
        let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
        let value = tag(exif).unwrap_or(1);
        // (transpose, mirror, flip) of the values 1 to 8.
        let (transpose, mirror, flip) = match value {
            2 => (false, true, false),
            3 => (false, true, true),
            4 => (false, false, true),
            5 => (true, false, false),
            6 => (true, true, false),
            7 => (true, true, true),
            8 => (true, false, true),
            _ => (false, false, false),
        };
        Self {
            transpose,
            mirror,
            flip,
        }
    }
}

/// The value of the tag in the first directory.
fn tag(tiff: &[u8]) -> Option<u16> {
    let big_endian = match tiff.get(..4)? {
        [b'I', b'I', 42, 0] => false,
        [b'M', b'M', 0, 42] => true,
        _ => return None,
    };
    let number = |at: usize, bytes: usize| -> Option<u32> {
        let stored = tiff.get(at..at.checked_add(bytes)?)?;
        let digit = |sum: u32, byte: &u8| sum << 8 | u32::from(*byte);
        Some(match big_endian {
            true => stored.iter().fold(0, digit),
            false => stored.iter().rev().fold(0, digit),
        })
    };
    let directory = number(4, 4)? as usize;
    let entries = number(directory, 2)? as usize;
    for entry in 0..entries {
        let at = directory.checked_add(2 + 12 * entry)?;
        // Tag, type (3: 16 bits), count, value.
        if number(at, 2)? == u32::from(TAG) && number(at + 2, 2)? == 3 {
            return u16::try_from(number(at + 8, 2)?).ok();
        }
    }
    None
}

/// The picture with its top up.
pub(super) fn upright(image: RgbImage, orientation: Orientation) -> RgbImage {
    let Orientation {
        transpose,
        mirror,
        flip,
    } = orientation;
    if orientation == Orientation::UPRIGHT {
        return image;
    }
    let (width, height) = match transpose {
        true => (image.height, image.width),
        false => (image.width, image.height),
    };
    let mut pixels = Vec::with_capacity(image.pixels.len());
    for y in 0..height {
        let y = if flip { height - 1 - y } else { y };
        for x in 0..width {
            let x = if mirror { width - 1 - x } else { x };
            let (x, y) = if transpose { (y, x) } else { (x, y) };
            pixels.extend(&image.pixels[3 * (y * image.width + x)..][..3]);
        }
    }
    RgbImage {
        width,
        height,
        pixels,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exif(value: u8, big_endian: bool) -> Vec<u8> {
        match big_endian {
            false => vec![
                b'I', b'I', 42, 0, 8, 0, 0, 0, 1, 0, 18, 1, 3, 0, 1, 0, 0, 0, value, 0, 0, 0,
            ],
            true => vec![
                b'M', b'M', 0, 42, 0, 0, 0, 8, 0, 1, 1, 18, 0, 3, 0, 0, 0, 1, 0, value, 0, 0,
            ],
        }
    }

    #[test]
    fn each_orientation_turns_as_pillow_does() {
        // Two rows of three pixels, each with its number; what `ImageOps.exif_transpose` makes of it.
        let expected: [(usize, &[u8]); 8] = [
            (3, &[0, 1, 2, 3, 4, 5]),
            (3, &[2, 1, 0, 5, 4, 3]),
            (3, &[5, 4, 3, 2, 1, 0]),
            (3, &[3, 4, 5, 0, 1, 2]),
            (2, &[0, 3, 1, 4, 2, 5]),
            (2, &[3, 0, 4, 1, 5, 2]),
            (2, &[5, 2, 4, 1, 3, 0]),
            (2, &[2, 5, 1, 4, 0, 3]),
        ];
        let pixels: Vec<u8> = (0..6u8).flat_map(|i| [i; 3]).collect();
        for (value, (width, numbers)) in (1..).zip(expected) {
            for big_endian in [false, true] {
                let image = RgbImage::new(3, 2, pixels.clone()).expect("an image");
                let turned = upright(image, Orientation::of_exif(&exif(value, big_endian)));
                assert_eq!(turned.width(), width);
                let found: Vec<u8> = turned.pixels().iter().step_by(3).copied().collect();
                assert_eq!(found, numbers, "{value}");
            }
        }
    }

    #[test]
    fn damaged_data_turn_nothing() {
        let whole = exif(6, false);
        for len in 0..whole.len() - 3 {
            assert_eq!(Orientation::of_exif(&whole[..len]), Orientation::UPRIGHT);
        }
        let mut far = whole.clone();
        far[4..8].fill(0xff);
        assert_eq!(Orientation::of_exif(&far), Orientation::UPRIGHT);
        assert_eq!(Orientation::of_exif(&exif(9, true)), Orientation::UPRIGHT);
    }
}
