//! Pictures become the pixel values of `transformers`; files that are none become errors.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_media::image::{
    Filter, ImageError, ImageLimits, ImageTransform, Resize, RgbImage, decode,
};
use proptest::prelude::*;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/images");
    root.join(name)
}

fn open(name: &str) -> RgbImage {
    let bytes = std::fs::read(fixture("files").join(name)).unwrap();
    decode(&bytes, ImageLimits::default()).unwrap()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn numbers(value: &Value) -> [f64; 3] {
    let all = value.as_array().unwrap().iter();
    let all: Vec<_> = all.map(|x| x.as_f64().unwrap()).collect();
    all.try_into().unwrap()
}

fn sides(value: &Value) -> Option<[usize; 2]> {
    let value = value.as_object()?;
    Some([number(value.get("height")?), number(value.get("width")?)])
}

/// The settings of a case, with the defaults of CLIP's processor.
fn transform(all: &Value, settings: &Value) -> ImageTransform {
    let is = |key: &str| settings[key].as_bool().unwrap_or(true);
    let size = &settings["size"];
    let normalise = is("do_normalize");
    ImageTransform {
        resize: match sides(size) {
            _ if !is("do_resize") => Resize::None,
            Some(size) => Resize::Exact(size),
            None => Resize::ShortestEdge(number(&size["shortest_edge"])),
        },
        filter: match settings["resample"].as_u64() {
            Some(1) => Filter::Lanczos,
            Some(2) => Filter::Bilinear,
            Some(4) => Filter::Box,
            Some(5) => Filter::Hamming,
            _ => Filter::Bicubic,
        },
        crop: sides(&settings["crop_size"]).filter(|_| is("do_center_crop")),
        scale: if is("do_rescale") { 1.0 / 255.0 } else { 1.0 },
        mean: if normalise {
            numbers(&all["image_mean"])
        } else {
            [0.0; 3]
        },
        std: if normalise {
            numbers(&all["image_std"])
        } else {
            [1.0; 3]
        },
    }
}

#[test]
fn pixel_values_are_those_of_transformers() {
    let text = std::fs::read(fixture("transforms.json")).unwrap();
    let all: Value = serde_json::from_slice(&text).unwrap();
    let mut compared = 0;
    for case in all["cases"].as_array().unwrap() {
        let transform = transform(&all, &case["settings"]);
        for (name, expected) in case["images"].as_object().unwrap() {
            let [height, width] = [1, 2].map(|axis| number(&expected["shape"][axis]));
            let found = transform.apply(&open(name), [height, width]).unwrap();
            assert_eq!(found.len(), 3 * height * width);
            for pair in expected["values"].as_array().unwrap() {
                let (at, value) = (number(&pair[0]), pair[1].as_f64().unwrap());
                let off = (f64::from(found[at]) - value).abs();
                let title = &case["name"];
                assert!(off <= 1e-6, "{title}, {name}, {at}: {} {value}", found[at]);
                compared += 1;
            }
        }
    }
    assert!(compared > 3_500, "{compared}");
}

#[test]
fn jpeg_files_are_near_the_pixels_that_they_were_made_of() {
    let photo = open("photo.png");
    let mean = |a: &RgbImage, b: &RgbImage| {
        assert_eq!((a.width(), a.height()), (b.width(), b.height()));
        let pairs = a.pixels().iter().zip(b.pixels());
        let sum: f64 = pairs.map(|(a, b)| f64::from(a.abs_diff(*b))).sum();
        sum / a.pixels().len() as f64
    };
    assert!(mean(&open("photo.jpg"), &photo) < 3.5);
    assert!(mean(&open("progressive.jpg"), &photo) < 25.0);
    let grey = open("grey.jpg");
    assert!(
        grey.pixels()
            .chunks_exact(3)
            .all(|p| p[0] == p[1] && p[1] == p[2])
    );
    // A camera that was held upright: rows are columns.
    let (turned, lying) = (open("turned.jpg"), open("photo.jpg"));
    assert_eq!(
        (turned.width(), turned.height()),
        (lying.height(), lying.width())
    );
    let at = |image: &RgbImage, x: usize, y: usize| {
        let pixel = &image.pixels()[3 * (y * image.width() + x)..][..3];
        [pixel[0], pixel[1], pixel[2]]
    };
    for (x, y) in [(0, 0), (5, 9), (66, 90)] {
        assert_eq!(at(&turned, x, y), at(&lying, y, lying.height() - 1 - x));
    }
}

#[test]
fn kinds_of_png_files_become_eight_bits_of_colour() {
    let png = |depth, color, palette: Option<&[u8]>, data: &[u8]| {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 2, 1);
        encoder.set_depth(depth);
        encoder.set_color(color);
        if let Some(palette) = palette {
            encoder.set_palette(palette.to_vec());
        }
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(data).unwrap();
        writer.finish().unwrap();
        let image = decode(&file, ImageLimits::default()).unwrap();
        image.pixels().to_vec()
    };
    use png::{BitDepth, ColorType};
    let colours = [1, 2, 3, 250, 251, 252];
    let palette = [9, 9, 9, 1, 2, 3, 250, 251, 252];
    for (found, expected) in [
        (
            png(
                BitDepth::Sixteen,
                ColorType::Rgb,
                None,
                &[1, 0, 2, 9, 3, 255, 250, 0, 251, 7, 252, 128],
            ),
            colours,
        ),
        (
            png(
                BitDepth::Sixteen,
                ColorType::Grayscale,
                None,
                &[1, 200, 254, 3],
            ),
            [1, 1, 1, 254, 254, 254],
        ),
        (
            png(
                BitDepth::Eight,
                ColorType::Rgba,
                None,
                &[1, 2, 3, 0, 250, 251, 252, 77],
            ),
            colours,
        ),
        (
            png(
                BitDepth::Eight,
                ColorType::GrayscaleAlpha,
                None,
                &[7, 0, 8, 9],
            ),
            [7, 7, 7, 8, 8, 8],
        ),
        (
            png(BitDepth::Two, ColorType::Grayscale, None, &[0b0111_0000]),
            [85, 85, 85, 255, 255, 255],
        ),
        (
            png(BitDepth::Four, ColorType::Indexed, Some(&palette), &[0x12]),
            colours,
        ),
    ] {
        assert_eq!(found, expected);
    }
}

#[test]
fn a_picture_of_another_size_than_the_model_reads_is_told() {
    let transform = ImageTransform {
        resize: Resize::ShortestEdge(30),
        filter: Filter::Bicubic,
        crop: None,
        scale: 1.0,
        mean: [0.0; 3],
        std: [1.0; 3],
    };
    let found = transform.apply(&open("photo.png"), [30, 30]);
    let expected = ImageError::WrongSize {
        found: [30, 40],
        expected: [30, 30],
    };
    assert_eq!(found, Err(expected));
}

/// A line of pixels takes no more memory than its result.
#[test]
fn pictures_of_any_proportion_are_resized() {
    let most = ImageLimits::default().side;
    for (width, height) in [(most, 1), (1, most), (1, 1)] {
        let image = RgbImage::new(width, height, vec![200; 3 * width * height]).unwrap();
        let transform = ImageTransform {
            resize: Resize::ShortestEdge(224),
            filter: Filter::Lanczos,
            crop: Some([224; 2]),
            scale: 1.0,
            mean: [0.0; 3],
            std: [1.0; 3],
        };
        let found = transform.apply(&image, [224; 2]).unwrap();
        assert!(found.iter().all(|&x| x == 200.0));
    }
}

proptest! {
    /// Damage anywhere is an error or other pixels, never a panic.
    #[test]
    fn damaged_files_do_no_harm(
        which in 0usize..4,
        cuts in 0usize..8000,
        edits in prop::collection::vec((0usize..8000, any::<u8>()), 0..8),
    ) {
        let name = ["photo.png", "palette.png", "photo.jpg", "progressive.jpg"][which];
        let mut bytes = std::fs::read(fixture("files").join(name)).unwrap();
        bytes.truncate(bytes.len().min(cuts + 8));
        for (at, value) in edits {
            let len = bytes.len();
            bytes[at % len] = value;
        }
        let limits = ImageLimits { side: 4096, pixels: 1 << 20 };
        if let Ok(image) = decode(&bytes, limits) {
            prop_assert!(image.width() * image.height() <= limits.pixels);
        }
    }
}
