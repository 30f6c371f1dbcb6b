//! Images in conversations: from parts of messages to what stands in a prompt.
//!
//! The readers of all three APIs make one kind of part of them, which keeps the file as it came (base64) and the field that it
//! came in. A URL gives way to the file that was fetched from it, if that is allowed. So a conversation that is kept has its images,
//! too. Before a template is rendered they are taken out; the template sees only that there is an image. Files are decoded here, within limits, on the threads that read requests;
//! the model's image tower computes them before the engine gets the prompt.

use crate::error::ApiError;
use crate::media::{FetchedImage, RemoteImage};
use crate::models::model::Model;
use crate::prompt::parts::{DATA, FIELD, KIND};
use crate::prompt::special_token_escape;
use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use ferrum_engine::vision::{ImageTask, PromptImage};
use ferrum_media::image::ImageLimits;
use ferrum_types::TokenId;
use serde_json::{Map, Value};
use std::time::Duration;
use tokio::time::timeout;

type Result<T> = std::result::Result<T, ApiError>;

/// Most images of a request.
const MAX_IMAGES: usize = 16;

/// The largest image: 32 million pixels, which take 0.1 GiB while they are resized.
const LIMITS: ImageLimits = ImageLimits {
    side: 16_384,
    pixels: 1 << 25,
};

/// Base64 with its padding, or without.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// An image as it came.
#[derive(Debug)]
pub(crate) struct SentImage {
    kind: String,
    field: String,
    data: Option<String>,
}

/// The parts of messages that are images.
fn image_parts(messages: &mut Value) -> impl Iterator<Item = &mut Map<String, Value>> {
    let messages = messages.as_array_mut().into_iter().flatten();
    let contents = messages.filter_map(|message| message.get_mut("content")?.as_array_mut());
    let parts = contents.flatten().filter_map(Value::as_object_mut);
    parts.filter(|part| part.get("type").is_some_and(|kind| kind == "image"))
}

/// The URL of an image that is elsewhere.
fn remote_url(part: &Map<String, Value>) -> Option<&str> {
    let url = part.get(DATA)?.as_str()?;
    is_remote(url).then_some(url)
}

fn is_remote(url: &str) -> bool {
    let scheme = url.split_once(':').map(|(scheme, _)| scheme.trim_start());
    let known = |scheme: &str| {
        ["http", "https"]
            .iter()
            .any(|s| scheme.eq_ignore_ascii_case(s))
    };
    scheme.is_some_and(known)
}

/// The images that are elsewhere.
///
/// # Errors
/// Where the model would refuse the images of the conversation, so that none is fetched for nothing.
pub(crate) fn remote(model: &Model, messages: &mut Value) -> Result<Vec<RemoteImage>> {
    let text = |part: &Map<String, Value>, key| {
        let text = part.get(key).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    let named = |part: &mut Map<String, Value>| SentImage {
        kind: text(part, KIND),
        field: text(part, FIELD),
        data: remote_url(part).map(str::to_owned),
    };
    let images: Vec<_> = image_parts(messages).map(named).collect();
    if images.iter().any(|image| image.data.is_some()) {
        check(model, &images)?;
    }
    let remote = images
        .into_iter()
        .filter_map(|SentImage { field, data, .. }| data.map(|url| RemoteImage { field, url }));
    Ok(remote.collect())
}

/// Puts the files of images that were elsewhere in the place of their URLs. They are in the order of [`remote`].
pub(crate) fn put(messages: &mut Value, fetched: &mut [FetchedImage]) {
    let parts = image_parts(messages).filter(|part| remote_url(part).is_some());
    for (part, image) in parts.zip(fetched) {
        let data = BASE64.encode(std::mem::take(&mut image.bytes));
        let url = format!("data:{};base64,{data}", image.media_type);
        part.insert(DATA.into(), url.into());
    }
}

/// Takes the files out of messages.
pub(crate) fn take(messages: &mut Value) -> Vec<SentImage> {
    image_parts(messages).map(take_one).collect()
}

fn take_one(part: &mut Map<String, Value>) -> SentImage {
    let mut text = |key: &str| match part.shift_remove(key) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    };
    SentImage {
        kind: text(KIND).unwrap_or_default(),
        field: text(FIELD).unwrap_or_default(),
        data: text(DATA),
    }
}

/// Refuses images, for a model or a route that reads only text.
pub(crate) fn refuse(images: &[SentImage]) -> Result<()> {
    match images.first() {
        None => Ok(()),
        Some(SentImage { kind, field, .. }) => {
            let reason = format!("found {kind:?}, expected a text: this model reads only text");
            Err(ApiError::unsupported(format!("{field}.type"), reason))
        }
    }
}

/// Refuses images for a model that reads only text, and too many for one that sees.
fn check(model: &Model, images: &[SentImage]) -> Result<()> {
    if model.served.vision.is_none() {
        return refuse(images);
    }
    match images.get(MAX_IMAGES) {
        None => Ok(()),
        Some(SentImage { field, .. }) => {
            let found = images.len();
            let reason = format!("found {found} images, expected at most {MAX_IMAGES}");
            Err(ApiError::invalid(field, reason))
        }
    }
}

/// The images of a prompt, for the tower.
pub(crate) fn read(model: &Model, images: Vec<SentImage>) -> Result<Vec<ImageTask>> {
    check(model, &images)?;
    let Some(vision) = &model.served.vision else {
        return Ok(Vec::new());
    };
    let decode = |image: SentImage| {
        let file = file(&image.field, image.data)?;
        let task = vision.preprocessor.read(&file, LIMITS);
        task.map_err(|e| {
            let sentence = e.to_string();
            ApiError::invalid(image.field, sentence.lines().next().unwrap_or_default())
        })
    };
    images.into_iter().map(decode).collect()
}

/// The bytes that a data URL has.
fn file(field: &str, url: Option<String>) -> Result<Vec<u8>> {
    let url = url.ok_or_else(|| {
        ApiError::invalid(field, "the image is missing; expected its data or URL")
    })?;
    if is_remote(&url) {
        let reason = "images are not fetched by this server, which runs without --allowed-media-domains; expected a data URL \
                      (data:image/png;base64,…)";
        return Err(ApiError::unsupported(field, reason));
    }
    let scheme = url.split_once(':');
    let data = scheme.filter(|(scheme, _)| scheme.trim_start().eq_ignore_ascii_case("data"));
    let Some((_, data)) = data else {
        let reason = "expected a data URL (data:image/png;base64,…), or one of http or https if this server fetches images";
        return Err(ApiError::invalid(field, reason));
    };
    let parts = data.split_once(',');
    let parts = parts.filter(|(kind, _)| kind.to_ascii_lowercase().ends_with(";base64"));
    let Some((_, data)) = parts else {
        let reason = "expected a data URL with base64 (data:image/png;base64,…)";
        return Err(ApiError::invalid(field, reason));
    };
    let bytes = BASE64.decode(data.trim());
    bytes.map_err(|e| ApiError::invalid(field, format!("the base64 is damaged: {e}")))
}

/// A rendered prompt with the tokens of its images.
pub(crate) fn expand(model: &Model, text: String, images: usize) -> Result<String> {
    match &model.served.vision {
        Some(vision) if images > 0 => {
            let text = vision
                .prompt
                .expand(&text, Some(special_token_escape::OPEN), images);
            text.map_err(|e| ApiError::invalid("messages", e.to_string()))
        }
        _ => Ok(text),
    }
}

/// An image that is to be computed, and where it begins in its prompt.
#[derive(Debug)]
pub(crate) struct PlacedImage {
    start: usize,
    task: ImageTask,
}

/// Where images are among the tokens of an [expanded](expand) prompt.
pub(crate) fn place(
    model: &Model,
    tokens: &[TokenId],
    images: Vec<ImageTask>,
) -> Result<Vec<PlacedImage>> {
    let Some(vision) = model.served.vision.as_ref().filter(|_| !images.is_empty()) else {
        return Ok(Vec::new());
    };
    let starts = vision.prompt.starts(tokens, images.len());
    let starts = starts.map_err(|e| ApiError::invalid("messages", e.to_string()))?;
    let placed = starts.into_iter().zip(images);
    Ok(placed
        .map(|(start, task)| PlacedImage { start, task })
        .collect())
}

/// Has the tower compute images, within the time that is left for the answer.
pub(crate) async fn embed_images(
    model: &Model,
    images: Vec<PlacedImage>,
    (priority, left): (i8, Duration),
) -> Result<Vec<PromptImage>> {
    let Some(vision) = model.served.vision.as_ref().filter(|_| !images.is_empty()) else {
        return Ok(Vec::new());
    };
    let mut embedded = Vec::with_capacity(images.len());
    let all = async {
        for PlacedImage { start, task } in images {
            let image = vision.engine.submit(task, priority).await?.output;
            embedded.push(PromptImage { start, image });
        }
        Ok::<(), ApiError>(())
    };
    timeout(left, all)
        .await
        .map_err(|_| ApiError::timeout())??;
    Ok(embedded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::parts::{image_part, text_part};
    use serde_json::json;

    #[test]
    fn data_urls_are_read_and_all_else_is_refused() {
        let read = |url: &str| file("f", Some(url.to_owned()));
        for url in [
            "data:image/png;base64,aGk=",
            "DATA:image/jpeg;charset=x;BASE64,aGk",
            "data:;base64, aGk= ",
        ] {
            assert_eq!(read(url).unwrap(), b"hi", "{url}");
        }
        for (url, words) in [
            ("https://example.org/a.png", "not fetched"),
            ("HTTP://example.org/a.png", "not fetched"),
            ("file:///etc/passwd", "a data URL"),
            ("iVBORw0KGgo=", "a data URL"),
            ("data:image/png,hi", "with base64"),
            ("data:image/png;base64", "with base64"),
            ("data:image/png;base64,a!", "damaged"),
            ("data:image/png;base64,a", "damaged"),
        ] {
            let error = read(url).unwrap_err();
            let body = serde_json::to_string(&error.body()).unwrap();
            assert!(body.contains(words), "{url}: {body}");
        }
        assert!(file("f", None).is_err());
    }

    #[test]
    fn fetched_files_take_the_places_of_their_urls() {
        let image =
            |data: Option<&str>| image_part("image_url", "f".into(), data.map(str::to_owned));
        let mut messages = json!([
            {"role": "user", "content": [image(Some("http://a/")), image(Some("data:,")), text_part("http://a/")]},
            {"role": "user", "content": [image(None), image(Some(" HTTPS://a/"))]},
        ]);
        let mut fetched = [b"1", b"2"].map(|bytes| FetchedImage::of("image/png", bytes));
        put(&mut messages, &mut fetched);
        let urls = take(&mut messages).into_iter().map(|image| image.data);
        let expected = [
            Some("data:image/png;base64,MQ=="),
            Some("data:,"),
            None,
            Some("data:image/png;base64,Mg=="),
        ];
        assert_eq!(
            urls.collect::<Vec<_>>(),
            expected.map(|url| url.map(str::to_owned))
        );
    }

    #[test]
    fn files_are_taken_out_of_messages() {
        let image = image_part(
            "image_url",
            "messages[0].content[0]".into(),
            Some("x".into()),
        );
        let mut messages = json!([{"role": "user", "content": [image, text_part("a")]}, {"role": "user", "content": "b"}]);
        let taken = take(&mut messages);
        assert_eq!(taken.len(), 1);
        assert_eq!(taken[0].data.as_deref(), Some("x"));
        let expected = json!([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]);
        assert_eq!(messages, expected);
        assert!(take(&mut messages).iter().all(|image| image.data.is_none()));
    }
}
