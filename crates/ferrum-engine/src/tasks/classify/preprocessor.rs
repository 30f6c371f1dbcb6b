//! What a folder says is done to pictures before its model reads them.

use ferrum_formats::{HfConfig, HfFolder};
use ferrum_media::image::{Filter, ImageTransform, Resize};
use ferrum_models::clip::ClipKind;
use ferrum_types::{Error, Result};

/// Pixels of the longest side that a file may ask for.
const MAX_SIDE: usize = 1 << 13;

/// Reads `preprocessor_config.json`, or the same object inside of `processor_config.json`. Keys that are left out mean what
/// the image processor of this kind of model takes for them.
pub(super) fn read(folder: &HfFolder, kind: ClipKind) -> Result<ImageTransform> {
    read_with(folder, kind, 3)
}

/// The same for the image tower of a decoder.
pub(crate) fn of_vision(folder: &HfFolder) -> Result<ImageTransform> {
    read_with(folder, ClipKind::Siglip, 2)
}

fn read_with(folder: &HfFolder, kind: ClipKind, resample: usize) -> Result<ImageTransform> {
    let path = folder.dir.join("preprocessor_config.json");
    if path.is_file() {
        return transform(&HfConfig::open(path)?, kind, resample);
    }
    let whole = folder.dir.join("processor_config.json");
    if whole.is_file()
        && let Some(section) = HfConfig::open(whole)?.section("image_processor")?
    {
        return transform(&section, kind, resample);
    }
    Err(Error::Model(format!(
        "{}: found no preprocessor_config.json, which says how images are resized",
        folder.dir.display()
    )))
}

fn transform(config: &HfConfig, kind: ClipKind, resample: usize) -> Result<ImageTransform> {
    let flag =
        |key: &str, otherwise: bool| -> Result<bool> { Ok(config.bool(key)?.unwrap_or(otherwise)) };
    let clip = kind == ClipKind::Clip;
    if flag("do_pad", false)? {
        let expected = "false, as nothing here pads";
        return Err(config.field_error("do_pad", expected).into());
    }
    if flag("do_pan_and_scan", false)? {
        let expected = "false, as nothing here cuts images into several";
        return Err(config.field_error("do_pan_and_scan", expected).into());
    }
    let (mean, std) = match clip {
        true => (
            [0.481_454_66, 0.457_827_5, 0.408_210_73],
            [0.268_629_54, 0.261_302_58, 0.275_777_11],
        ),
        false => ([0.5; 3], [0.5; 3]),
    };
    let (mean, std) = match flag("do_normalize", true)? {
        true => (
            channels(config, "image_mean", mean)?,
            channels(config, "image_std", std)?,
        ),
        false => ([0.0; 3], [1.0; 3]),
    };
    if std.iter().any(|&x| x as f32 == 0.0) {
        let expected = "numbers that something can be divided by";
        return Err(config.field_error("image_std", expected).into());
    }
    Ok(ImageTransform {
        resize: match flag("do_resize", true)? {
            true => resize(config, clip)?,
            false => Resize::None,
        },
        filter: filter(config, resample)?,
        crop: match flag("do_center_crop", clip)? {
            true => Some(crop(config)?),
            false => None,
        },
        scale: match flag("do_rescale", true)? {
            true => config.f64("rescale_factor")?.unwrap_or(1.0 / 255.0),
            false => 1.0,
        },
        mean,
        std,
    })
}

/// A side's length.
fn side(config: &HfConfig, key: &str) -> Result<usize> {
    let found = config.require_usize(key)?;
    match found <= MAX_SIDE {
        true => Ok(found),
        false => {
            let expected = format!("at most {MAX_SIDE}");
            Err(config.field_error(key, expected).into())
        }
    }
}

/// `[height, width]` of an object.
fn both_sides(config: &HfConfig) -> Result<[usize; 2]> {
    Ok([side(config, "height")?, side(config, "width")?])
}

fn resize(config: &HfConfig, clip: bool) -> Result<Resize> {
    if !config.has("size") {
        return Ok(match clip {
            true => Resize::ShortestEdge(224),
            false => Resize::Exact([224; 2]),
        });
    }
    // A number alone, as it was written before sizes were objects.
    if config.value("size").is_some_and(|size| size.is_number()) {
        return Ok(Resize::ShortestEdge(side(config, "size")?));
    }
    let Some(size) = config.section("size")? else {
        return Err(config.field_error("size", "an object").into());
    };
    for key in ["longest_edge", "max_height", "max_width"] {
        if size.has(key) {
            let expected = "nothing: only shortest_edge, or height and width, are supported";
            return Err(size.field_error(key, expected).into());
        }
    }
    match size.has("shortest_edge") {
        true => Ok(Resize::ShortestEdge(side(&size, "shortest_edge")?)),
        false => Ok(Resize::Exact(both_sides(&size)?)),
    }
}

fn crop(config: &HfConfig) -> Result<[usize; 2]> {
    if !config.has("crop_size") {
        return Ok([224; 2]);
    }
    if config
        .value("crop_size")
        .is_some_and(|size| size.is_number())
    {
        return Ok([side(config, "crop_size")?; 2]);
    }
    match config.section("crop_size")? {
        Some(size) => both_sides(&size),
        None => Err(config.field_error("crop_size", "an object").into()),
    }
}

/// Pillow's numbers.
fn filter(config: &HfConfig, otherwise: usize) -> Result<Filter> {
    match config.usize("resample")?.unwrap_or(otherwise) {
        1 => Ok(Filter::Lanczos),
        2 => Ok(Filter::Bilinear),
        3 => Ok(Filter::Bicubic),
        4 => Ok(Filter::Box),
        5 => Ok(Filter::Hamming),
        _ => {
            let expected = "1 to 5: Lanczos, bilinear, bicubic, box or Hamming";
            Err(config.field_error("resample", expected).into())
        }
    }
}

/// A number for each channel, or one for all.
fn channels(config: &HfConfig, key: &str, otherwise: [f64; 3]) -> Result<[f64; 3]> {
    if !config.has(key) {
        return Ok(otherwise);
    }
    if config.value(key).is_some_and(|value| value.is_number()) {
        return Ok([config.require_f64(key)?; 3]);
    }
    let found = config.f64s(key)?.unwrap_or_default();
    <[f64; 3]>::try_from(found).map_err(|_| config.field_error(key, "three numbers").into())
}
