//! Images in prompts: the answers of `transformers`, whatever else is computed, cached or preempted.

use crate::{Answered, collect, greedy};
use ferrum_engine::vision::{ImageEmbeddings, ImagePrompt, PromptImage, VisionTower};
use ferrum_engine::{
    BackendDispatch, BackendKind, BackendOptions, DraftRunner, Engine, EngineConfig, EngineError,
    KvDtype, Request, Runners, Session, generate_with_images,
};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_formats::{HfFolder, ModelSource};
use ferrum_media::image::ImageLimits;
use ferrum_models::vision::read_vision;
use ferrum_models::{KvLayout, RunnerConfig, read_model};
use ferrum_types::TokenId;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SOFT: TokenId = 304;
const CONFIG: RunnerConfig = RunnerConfig {
    context: 192,
    max_seqs: 4,
    // An image of 9 tokens fits into a step in which three sequences decode, and most prompts need several steps.
    max_tokens: 13,
    max_logit_rows: 13,
    kv_tokens: 4 * 192,
    kept_states: 0,
    layout: KvLayout::Grouped { block_size: 4 },
    profile: false,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn source() -> ModelSource {
    ModelSource::open(root().join("vision/gemma3")).unwrap()
}

fn cpu() -> BackendDispatch {
    let options = BackendOptions {
        threads: Some(2),
        ..BackendOptions::default()
    };
    BackendDispatch::from_kind(BackendKind::Cpu, options).unwrap()
}

fn session(config: RunnerConfig) -> Session {
    let model = read_model(source()).unwrap();
    cpu()
        .load(&model, config, KvDtype::F32, &mut |_, _| ())
        .unwrap()
}

fn start(config: RunnerConfig) -> Engine {
    let runner = session(config).into_runner();
    Engine::start(runner, None, EngineConfig::default()).unwrap()
}

/// The tower of the fixture, its tokenizer, and the chats of `expected.json`.
struct Fixture {
    tower: VisionTower,
    tokenizer: Arc<Tokenizer>,
    prompt: ImagePrompt,
    chats: Vec<Value>,
}

impl Fixture {
    fn open() -> Self {
        let source = source();
        let ModelSource::Hf(folder) = &source else {
            panic!("a folder")
        };
        let folder: &HfFolder = folder;
        let tokenizer = Arc::new(Tokenizer::from_hf_dir(&folder.dir).unwrap());
        let text = std::fs::read(folder.dir.join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&text).unwrap();
        let model = read_vision(source).unwrap();
        let tower = VisionTower::load(&cpu(), &model, &mut |_, _| ()).unwrap();
        Self {
            prompt: ImagePrompt::new(tower.spec(), &tokenizer).unwrap(),
            tower,
            tokenizer,
            chats: expected["chats"].as_array().unwrap().clone(),
        }
    }

    fn image(&mut self, name: &str) -> ImageEmbeddings {
        let file = std::fs::read(root().join("images/files").join(name)).unwrap();
        let task = self
            .tower
            .preprocessor()
            .read(&file, ImageLimits::default());
        let task = task.unwrap();
        self.tower.embed(&task).unwrap()
    }

    /// The request of a chat, with other images if some are named, and its answer.
    fn request(&mut self, chat: usize, names: Option<&[&str]>) -> (Request, Vec<TokenId>) {
        let chat = self.chats[chat].clone();
        let own: Vec<_> = chat["images"].as_array().unwrap().iter().collect();
        let own: Vec<_> = own.into_iter().map(|name| name.as_str().unwrap()).collect();
        let images: Vec<_> = names
            .unwrap_or(&own)
            .iter()
            .map(|name| self.image(name))
            .collect();
        let text = chat["text"].as_str().unwrap();
        let text = self.prompt.expand(text, None, images.len()).unwrap();
        let tokens = self.tokenizer.encode(&text, EncodeOptions::PROMPT).unwrap();
        assert_eq!(tokens, ids(&chat["ids"]));
        let images = self.prompt.place(&tokens, images).unwrap();
        let request = Request {
            images,
            ..greedy(&tokens, 48)
        };
        (request, ids(&chat["greedy"]))
    }
}

fn ids(value: &Value) -> Vec<TokenId> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as TokenId).collect()
}

fn submit(engine: &Engine, requests: &[Request]) -> Vec<Answered> {
    let submit = |request: &Request| engine.handle().submit(request.clone()).unwrap();
    let streams: Vec<_> = requests.iter().map(submit).collect();
    streams.into_iter().map(collect).collect()
}

#[test]
fn answers_are_those_of_transformers_alone_and_among_others() {
    let mut fixture = Fixture::open();
    let chats: Vec<_> = (0..3).map(|chat| fixture.request(chat, None)).collect();
    let mut one = session(CONFIG);
    for (request, expected) in &chats {
        let prompt = (&request.prompt[..], &request.images[..]);
        let wanted = &request.generation;
        let mut whole = |_: &str| true;
        let stats =
            generate_with_images(&mut one, &fixture.tokenizer, prompt, wanted, &mut whole).unwrap();
        assert_eq!(&stats.tokens, expected);
    }
    let text = fixture
        .tokenizer
        .encode("the other rain", EncodeOptions::PLAIN);
    let text = greedy(&text.unwrap(), 60);
    let alone = submit(&start(CONFIG), std::slice::from_ref(&text));
    let mut requests: Vec<_> = chats.iter().map(|(request, _)| request.clone()).collect();
    requests[1].n = 2;
    requests.insert(0, text.clone());
    requests.push(text);
    let paged = KvLayout::Paged { block_size: 16 };
    for (how, config, draft) in [
        ("in small steps", CONFIG, 0),
        (
            "in one step",
            RunnerConfig {
                max_tokens: 128,
                ..CONFIG
            },
            0,
        ),
        (
            "in one table",
            RunnerConfig {
                layout: paged,
                ..CONFIG
            },
            0,
        ),
        ("with drafts", CONFIG, 5),
    ] {
        let engine = start(config);
        requests
            .iter_mut()
            .for_each(|request| request.draft_tokens = draft);
        for round in ["cold", "warm"] {
            let found = submit(&engine, &requests);
            for place in [0, 4] {
                assert_eq!(found[place].tokens(), alone[0].tokens(), "{how}, {round}");
            }
            for (found, (_, expected)) in found[1..].iter().zip(&chats) {
                for choice in &found.choices {
                    assert_eq!(&choice.tokens, expected, "{how}, {round}");
                }
            }
        }
        let stats = engine.handle().stats();
        assert!(stats.cached_tokens > 50, "{how}: {stats:?}");
    }
}

#[test]
fn a_draft_model_need_not_see_images() {
    let mut fixture = Fixture::open();
    let (request, expected) = fixture.request(2, None);
    let draft = DraftRunner {
        runner: session(CONFIG).into_runner(),
        tokens: 3,
        features: None,
    };
    let runners = Runners {
        model: session(CONFIG).into_runner(),
        draft: Some(draft),
    };
    let engine = Engine::start(runners, None, EngineConfig::default()).unwrap();
    assert_eq!(submit(&engine, &[request])[0].tokens(), expected);
}

#[test]
fn sequences_that_lose_their_blocks_see_their_images_again() {
    let mut fixture = Fixture::open();
    let chats: Vec<_> = (0..3).map(|chat| fixture.request(chat, None)).collect();
    let requests: Vec<_> = chats.iter().map(|(request, _)| request.clone()).collect();
    let tight = RunnerConfig {
        kv_tokens: 160,
        ..CONFIG
    };
    let engine = start(tight);
    for _ in 0..2 {
        for (found, (_, expected)) in submit(&engine, &requests).iter().zip(&chats) {
            assert_eq!(found.tokens(), expected);
        }
    }
    let stats = engine.handle().stats();
    assert!(stats.preemptions > 0, "{stats:?}");
}

/// The tokens of two images are the same; what was computed for one is never taken for the other.
#[test]
fn prompts_share_what_is_before_another_image() {
    let mut fixture = Fixture::open();
    let names: [&[&str]; 3] = [
        &["grey.png", "photo.png", "grey.png"],
        &["grey.png", "tall.png", "grey.png"],
        &["alpha.png", "photo.png", "grey.png"],
    ];
    let requests = names.map(|names| fixture.request(2, Some(names)).0);
    let alone = requests
        .clone()
        .map(|request| submit(&start(CONFIG), &[request]).remove(0));
    assert_ne!(alone[0].tokens(), alone[1].tokens());
    assert_ne!(alone[0].tokens(), alone[2].tokens());
    let whole = RunnerConfig {
        layout: KvLayout::Paged { block_size: 4 },
        ..CONFIG
    };
    let engine = start(whole);
    let mut cached = Vec::new();
    for (request, alone) in requests
        .iter()
        .zip(&alone)
        .chain([(&requests[0], &alone[0])])
    {
        let found = submit(&engine, std::slice::from_ref(request)).remove(0);
        assert_eq!(found.tokens(), alone.tokens());
        cached.push(found.usage.unwrap().cached_tokens);
    }
    let starts: Vec<_> = requests[0].images.iter().map(|image| image.start).collect();
    // Whole blocks before the image that differs; in the end all but the last token's block.
    let blocks = |tokens: usize| tokens / 4 * 4;
    let expected = [
        0,
        blocks(starts[1]),
        blocks(starts[0]),
        blocks(requests[0].prompt.len() - 1),
    ];
    assert_eq!(cached, expected);
    // Without its images it is a text, which shares with none of them.
    let text = Request {
        images: Vec::new(),
        ..requests[0].clone()
    };
    let found = submit(&engine, &[text]).remove(0);
    assert_eq!(found.usage.unwrap().cached_tokens, blocks(starts[0]));
    assert_ne!(found.tokens(), alone[0].tokens());
}

/// A conversation on a session keeps what it has of images that come again.
#[test]
fn a_session_keeps_images_that_come_again() {
    let mut fixture = Fixture::open();
    let (request, expected) = fixture.request(2, None);
    let (other, _) = fixture.request(2, Some(&["grey.png", "tall.png", "grey.png"]));
    let mut session = session(CONFIG);
    let mut computed = |request: &Request| {
        let prompt = (&request.prompt[..], &request.images[..]);
        let (tokenizer, wanted) = (&fixture.tokenizer, &request.generation);
        let stats =
            generate_with_images(&mut session, tokenizer, prompt, wanted, &mut |_| true).unwrap();
        (stats.computed_tokens, stats.tokens)
    };
    let (len, start) = (request.prompt.len(), request.images[1].start);
    assert_eq!(computed(&request), (len, expected.clone()));
    // Windows have moved on, so all of it is computed again.
    let (again, tokens) = computed(&request);
    assert!(again == 1 || again == len, "{again}");
    assert_eq!(tokens, expected);
    let (found, tokens) = computed(&other);
    assert!(found == len - start || found == len, "{found}");
    assert_ne!(tokens, expected);
    assert_eq!(computed(&request).1, expected);
}

#[test]
fn images_that_cannot_be_are_refused() {
    let mut fixture = Fixture::open();
    let (request, _) = fixture.request(2, None);
    let engine = start(CONFIG);
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = request.clone();
        change(&mut request);
        match engine.handle().submit(request).map(|_| ()) {
            Err(EngineError::Invalid { field, reason }) => format!("{field}: {reason}"),
            other => format!("{other:?}"),
        }
    };
    let image = |tokens: usize, numbers: usize| PromptImage {
        start: 0,
        image: ImageEmbeddings::new(tokens, vec![0.0; numbers]),
    };
    type Change<'a> = &'a dyn Fn(&mut Request);
    let cases: [(Change<'_>, &str); 7] = [
        (&|r| r.images.swap(0, 1), "in order"),
        (
            &|r| r.images[1].start = r.images[0].start + 1,
            "side by side",
        ),
        (&|r| r.images[2].start = r.prompt.len() - 8, "inside of the"),
        (
            &|r| r.images = vec![image(9, 9 * 36 - 1)],
            "found 323 numbers, expected 324",
        ),
        (&|r| r.images = vec![image(0, 0)], "in order"),
        (
            &|r| r.images = vec![image(11, 11 * 36)],
            "has 11 tokens, a step has room for 10",
        ),
        (
            &|r| r.prompt_logprobs = Some(1),
            "neither log-probabilities",
        ),
    ];
    for (change, words) in cases {
        let found = refused(change);
        assert!(
            found.contains(words) && found.starts_with("images"),
            "{found}"
        );
    }
    let tokens = &request.prompt;
    let prompt = &fixture.prompt;
    for (tokens, images) in [
        (&tokens[..], 2),
        (tokens, 0),
        (&tokens[..request.images[2].start + 3], 3),
        (&[&tokens[..], &[SOFT]].concat(), 3),
    ] {
        let error = prompt.starts(tokens, images).unwrap_err().to_string();
        assert!(error.contains("tokens of images"), "{error}");
    }
    let error = prompt.expand("no place", None, 1).unwrap_err().to_string();
    assert!(error.contains("0 times \"<start_of_image>\""), "{error}");
    let spelled = prompt.expand("~<start_of_image> <start_of_image>", Some('~'), 1);
    let soft = "<image_soft_token>".repeat(9);
    assert_eq!(
        spelled.unwrap(),
        format!("~<start_of_image> \n\n<start_of_image>{soft}<end_of_image>\n\n")
    );
}
