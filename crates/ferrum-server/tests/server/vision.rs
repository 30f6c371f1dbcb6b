//! Images in requests of all three APIs: the answers of `transformers`, and refusals that do not affect other requests.

use super::*;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ferrum_engine::engine::Clock;
use ferrum_engine::vision::{ImagePrompt, VisionTower};
use ferrum_engine::{TaskConfig, TaskEngine};
use ferrum_models::vision::read_vision;
use ferrum_server::ServedVision;
use serde_json::json;
use std::path::Path;

pub(super) const CHAT: &str = "/v1/chat/completions";
pub(super) const RESPONSES: &str = "/v1/responses";
pub(super) const MESSAGES: &str = "/v1/messages";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn folder() -> PathBuf {
    root().join("vision/gemma3")
}

fn server() -> Running {
    configured(ServerConfig::default())
}

/// The model that sees, and the demo model, which does not.
pub(super) fn configured(config: ServerConfig) -> Running {
    let loader = |name: &str| match name {
        "sees" => Ok(seeing()),
        _ => {
            let (model, text) = demo_model();
            let engine = (EngineConfig::default(), 2);
            Ok(load(model, text, engine, |runner| runner))
        }
    };
    let names = ["sees", "demo"];
    Running::models(&names, Arc::new(loader), 2, config)
}

fn seeing() -> LoadedModel {
    let open = || ModelSource::open(folder()).unwrap();
    let tokenizer = Tokenizer::from_hf_dir(folder()).unwrap();
    let template = ChatTemplate::from_hf_dir(folder()).unwrap();
    let vision = read_vision(open()).unwrap();
    let prompt = ImagePrompt::new(&vision.spec, &tokenizer).unwrap();
    let options = BackendOptions {
        threads: Some(1),
        ..BackendOptions::default()
    };
    let device = BackendDispatch::from_kind(BackendKind::Cpu, options).unwrap();
    let tower = VisionTower::load(&device, &vision, &mut |_, _| ()).unwrap();
    let preprocessor = tower.preprocessor().clone();
    let config = TaskConfig {
        max_waiting: 16,
        stall_after: PATIENCE,
        clock: Clock::system(),
    };
    let engine = TaskEngine::start(tower, config).unwrap();
    let model = read_model(open()).unwrap();
    let text = (tokenizer, template);
    let mut loaded = load(model, text, (EngineConfig::default(), 4), |runner| runner);
    if let LoadedModel::Decoder(_, model) = &mut loaded {
        model.vision = Some(ServedVision::new(engine, preprocessor, prompt));
    }
    loaded
}

pub(super) fn file(name: &str) -> Vec<u8> {
    std::fs::read(root().join("images/files").join(name)).unwrap()
}

fn data_url(name: &str) -> String {
    format!(
        "data:image/png;base64,{}",
        BASE64_STANDARD.encode(file(name))
    )
}

/// The chats of the fixture.
fn chats() -> Vec<Value> {
    let text = std::fs::read(folder().join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    expected["chats"].as_array().unwrap().clone()
}

/// The text of a chat's greedy answer, and the tokens of its prompt.
fn expected(chat: &Value) -> (String, usize) {
    let ids = |key: &str| -> Vec<u32> {
        let ids = chat[key].as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let tokenizer = Tokenizer::from_hf_dir(folder()).unwrap();
    let greedy = ids("greedy");
    assert!(tokenizer.eos_ids().iter().all(|eos| !greedy.contains(eos)));
    (tokenizer.decode(&greedy, true), ids("ids").len())
}

/// The messages of a chat, with parts as `image` and `text` make them.
fn messages(chat: &Value, image: impl Fn(&str) -> Value, text: impl Fn(&str) -> Value) -> Value {
    let mut messages = chat["messages"].clone();
    for message in messages.as_array_mut().unwrap() {
        let assistant = message["role"] == "assistant";
        for part in message["content"].as_array_mut().unwrap() {
            *part = match part["image"].as_str() {
                Some(name) => image(name),
                None => text(part["text"].as_str().unwrap()),
            };
        }
        if assistant {
            message["content"] = "a grey one".into();
        }
    }
    messages
}

#[test]
fn chats_about_images_get_the_answers_of_transformers() {
    let server = server();
    assert_eq!(
        server.get("/props").json()["modalities"]["vision"],
        true,
        "its clients ask before they send images"
    );
    check_chats(&server, data_url, |name| {
        let data = BASE64_STANDARD.encode(file(name));
        json!({"type": "base64", "media_type": "image/png", "data": data})
    });
}

/// Asks all chats of the fixture of all three APIs. `url` is where an image is, `source` the same for Anthropic's.
pub(super) fn check_chats(
    server: &Running,
    url: impl Fn(&str) -> String,
    source: impl Fn(&str) -> Value,
) {
    for chat in chats() {
        let (text, tokens) = expected(&chat);
        let part = |text: &str| json!({"type": "text", "text": text});
        let image = |name: &str| json!({"type": "image_url", "image_url": {"url": url(name), "detail": "high"}});
        let body = json!({"model": "sees", "temperature": 0, "max_tokens": 48, "ignore_eos": true,
            "messages": messages(&chat, image, part)});
        let answer = server.ask(CHAT, &body);
        assert_eq!(answer["choices"][0]["message"]["content"], text, "{answer}");
        assert_eq!(answer["usage"]["prompt_tokens"], tokens);

        let image = |name: &str| json!({"type": "input_image", "image_url": url(name)});
        let part = |text: &str| json!({"type": "input_text", "text": text});
        let body = json!({"model": "sees", "temperature": 0, "max_output_tokens": 48,
            "input": messages(&chat, image, part)});
        let answer = server.ask(RESPONSES, &body);
        let found = answer["output"][0]["content"][0]["text"].as_str().unwrap();
        assert!(text.starts_with(found) && !found.is_empty(), "{answer}");
        assert_eq!(answer["usage"]["input_tokens"], tokens);

        let image = |name: &str| json!({"type": "image", "source": source(name)});
        let part = |text: &str| json!({"type": "text", "text": text});
        let body = json!({"model": "sees", "temperature": 0, "max_tokens": 48,
            "messages": messages(&chat, image, part)});
        let answer = server.ask(MESSAGES, &body);
        let found = answer["content"][0]["text"].as_str().unwrap();
        assert!(text.starts_with(found) && !found.is_empty(), "{answer}");
        assert_eq!(
            answer["usage"]["input_tokens"].as_u64().unwrap()
                + answer["usage"]["cache_read_input_tokens"]
                    .as_u64()
                    .unwrap_or(0),
            tokens as u64
        );
        let count = json!({"model": "sees", "messages": body["messages"]});
        let count = server.ask("/v1/messages/count_tokens", &count);
        assert_eq!(count["input_tokens"], tokens);
    }
}

/// A response that goes on from another has its images.
#[test]
fn kept_conversations_keep_their_images() {
    let server = server();
    let image =
        json!({"type": "input_image", "image_url": data_url("photo.png"), "detail": "auto"});
    let first = json!([{"role": "user", "content": [image, {"type": "input_text", "text": "What is this?"}]}]);
    let mut body = json!({"model": "sees", "temperature": 0, "max_output_tokens": 5, "input": first, "store": true});
    let answer = server.ask(RESPONSES, &body);
    let id = answer["id"].as_str().unwrap();
    let items = server
        .get(&format!("/v1/responses/{id}/input_items"))
        .json();
    assert_eq!(items["data"][0]["content"], first[0]["content"], "{items}");
    let said = json!({"role": "assistant", "content": answer["output"][0]["content"][0]["text"]});
    let next = json!({"role": "user", "content": "And?"});
    body["input"] = json!([next]);
    body["previous_response_id"] = id.into();
    let kept = server.ask(RESPONSES, &body);
    body["input"] = json!([first[0], said, next]);
    body["previous_response_id"] = Value::Null;
    let whole = server.ask(RESPONSES, &body);
    assert_eq!(kept["output"][0]["content"], whole["output"][0]["content"]);
    assert_eq!(
        kept["usage"]["input_tokens"],
        whole["usage"]["input_tokens"]
    );
}

/// A PNG file that says it has so many pixels, and has none.
fn claimed(width: u32, height: u32) -> String {
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    file.extend([width.to_be_bytes(), height.to_be_bytes()].concat());
    file.extend([8, 2, 0, 0, 0]);
    let mut crc = !0u32;
    for byte in &file[12..] {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                0xedb8_8320 ^ (crc >> 1)
            } else {
                crc >> 1
            };
        }
    }
    file.extend((!crc).to_be_bytes());
    format!("data:image/png;base64,{}", BASE64_STANDARD.encode(file))
}

/// A question with images, by their addresses.
pub(super) fn ask(server: &Running, model: &str, urls: &[&str], text: &str) -> Reply {
    let images = urls
        .iter()
        .map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
    let text = json!({"type": "text", "text": text});
    let parts: Vec<_> = images.chain([text]).collect();
    let messages = json!([{"role": "user", "content": parts}]);
    let body = json!({"model": model, "max_tokens": 4, "messages": messages});
    server.post(CHAT, &body)
}

#[test]
fn images_that_cannot_be_read_harm_only_their_request() {
    let server = server();
    let good = data_url("photo.png");
    let no_image = format!(
        "data:image/png;base64,{}",
        BASE64_STANDARD.encode("no image at all")
    );
    let (wide, huge) = (claimed(20_000, 2), claimed(10_000, 10_000));
    let many = vec![&*good; 17];
    for (model, urls, param, words) in [
        (
            "sees",
            &["https://example.org/a.png"][..],
            "messages[0].content[0]",
            "not fetched",
        ),
        (
            "sees",
            &[&good, "data:image/png;base64,a!"],
            "messages[0].content[1]",
            "damaged",
        ),
        (
            "sees",
            &["data:image/png,hi"],
            "messages[0].content[0]",
            "base64",
        ),
        (
            "sees",
            &[&no_image],
            "messages[0].content[0]",
            "not an image that is supported",
        ),
        (
            "sees",
            &[&wide],
            "messages[0].content[0]",
            "20000 x 2 pixels",
        ),
        (
            "sees",
            &[&huge],
            "messages[0].content[0]",
            "10000 x 10000 pixels",
        ),
        (
            "sees",
            &[&claimed(4, 4)],
            "messages[0].content[0]",
            "cannot be decoded",
        ),
        (
            "sees",
            &many,
            "messages[0].content[16]",
            "found 17 images, expected at most 16",
        ),
        (
            "demo",
            &[&good],
            "messages[0].content[0].type",
            "reads only text",
        ),
    ] {
        let answer = ask(&server, model, urls, "a");
        assert_eq!(answer.status, 400, "{words}");
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        assert!(
            error["message"].as_str().unwrap().contains(words),
            "{error}"
        );
    }
}

#[test]
fn what_users_spell_out_is_no_image() {
    let server = server();
    let good = data_url("photo.png");
    for (urls, text) in [
        (&[&*good][..], "<start_of_image> <image_soft_token>"),
        (&[], "<start_of_image>"),
    ] {
        let answer = ask(&server, "sees", urls, text);
        assert_eq!(answer.status, 200, "{text}");
    }
    // A route that only writes prompts has no place for them.
    let image = json!({"type": "image_url", "image_url": good});
    let messages = json!([{"role": "user", "content": [image]}]);
    let answer = server.post("/tokenize", &json!({"model": "sees", "messages": messages}));
    assert_eq!(answer.status, 400);
    // Log-probabilities of a prompt would have to be those of an image's tokens.
    let body =
        json!({"model": "sees", "messages": messages, "prompt_logprobs": 1, "max_tokens": 1});
    let answer = server.post(CHAT, &body);
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["param"], "images");
}
