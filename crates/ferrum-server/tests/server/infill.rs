//! Filling in the middle: `/infill`, and `suffix` on `/v1/completions`. The prompts are those that the model saw.

use super::hooked::{Hooks, hooked};
use super::{Running, demo_model};
use ferrum_engine::EngineConfig;
use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{FimIds, GgufVocab, Tokenizer};
use ferrum_models::StepBatch;
use ferrum_server::ServerConfig;
use ferrum_types::{Result, TokenId};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const QWEN: &[&str] = &[
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

/// Notes the tokens that a runner is given.
struct Noting(Arc<Mutex<Vec<TokenId>>>);

impl Hooks for Noting {
    fn before(&mut self, batch: &StepBatch) -> Result<()> {
        self.0.lock().unwrap().extend(&batch.tokens);
        Ok(())
    }
}

/// The demo model, the last tokens of whose vocabulary are these.
struct Coder {
    server: Running,
    tokenizer: Tokenizer,
    seen: Arc<Mutex<Vec<TokenId>>>,
}

impl Coder {
    /// With these spellings, of tokens of a kind; 3 is control, 1 a word as any other.
    fn spelled(spellings: &[&str], kind: i32) -> Self {
        Self::with(spellings, kind, |_| ())
    }

    fn with(spellings: &[&str], kind: i32, change: impl FnOnce(&mut GgufVocab)) -> Self {
        let gguf = Gguf::from_static(super::DEMO).unwrap();
        let mut vocab = GgufVocab::from_gguf(&gguf).unwrap();
        let first = vocab.tokens.len() - spellings.len();
        // The last tokens are those of the last merges.
        vocab.merges.truncate(vocab.merges.len() - spellings.len());
        let types = vocab.token_types.as_mut().unwrap();
        for (i, spelled) in spellings.iter().enumerate() {
            vocab.tokens[first + i] = (*spelled).to_owned();
            types[first + i] = kind;
        }
        change(&mut vocab);
        let tokenizer = || Tokenizer::from_gguf_vocab(&vocab).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (model, (_, template)) = demo_model();
        let engine = EngineConfig {
            prefix_cache: false,
            ..EngineConfig::default()
        };
        let note = Arc::clone(&seen);
        let text = (tokenizer(), template);
        let config = ServerConfig::default();
        let server = Running::with(model, text, config, (engine, 2), |inner| {
            hooked(inner, Noting(note))
        });
        Self {
            server,
            tokenizer: tokenizer(),
            seen,
        }
    }

    /// The prompt that the model sees of a request, with the tokens of the vocabulary written out.
    fn prompt(&self, path: &str, body: &Value) -> String {
        let tokens = self.tokens(path, body);
        self.tokenizer.decode(&tokens, false)
    }

    fn tokens(&self, path: &str, body: &Value) -> Vec<TokenId> {
        self.seen.lock().unwrap().clear();
        let mut body = body.clone();
        let (most, more) = match path {
            "/infill" => ("n_predict", json!(0)),
            _ => ("max_tokens", json!(0)),
        };
        body[most] = more;
        let answer = self.server.ask(path, &body);
        // A step of those that look after the health has no such tokens.
        let seen = self.seen.lock().unwrap().clone();
        if path == "/infill" {
            assert_eq!(answer["tokens_evaluated"], seen.len());
        }
        seen
    }

    fn id(&self, spelled: &str) -> TokenId {
        self.tokenizer.token_id(spelled).unwrap()
    }
}

#[test]
fn each_family_has_its_layout() {
    let gap = json!({"input_prefix": "a cat\n", "prompt": "and", "input_suffix": "a dog"});
    let openai = json!({"prompt": "a cat\nand", "suffix": "a dog"});
    let cases: [(&[&str], &str); 6] = [
        (
            QWEN,
            "<|fim_prefix|>a cat\nand<|fim_suffix|>a dog<|fim_middle|>",
        ),
        (
            &["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
            "<fim_prefix>a cat\nand<fim_suffix>a dog<fim_middle>",
        ),
        (
            &["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            "<｜fim▁begin｜>a cat\nand<｜fim▁hole｜>a dog<｜fim▁end｜>",
        ),
        (
            &["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
            "▁<PRE>a cat\nand▁<SUF>a dog▁<MID>",
        ),
        // The suffix first, and nothing before the answer.
        (
            &["[PREFIX]", "[SUFFIX]", "[MIDDLE]"],
            "[SUFFIX]a dog[PREFIX]a cat\nand",
        ),
        (
            &["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"],
            "<[fim-suffix]>a dog<[fim-prefix]>a cat\nand<[fim-middle]>",
        ),
    ];
    for (spellings, expected) in cases {
        let coder = Coder::spelled(spellings, 3);
        assert_eq!(coder.prompt("/infill", &gap), expected);
        assert_eq!(coder.prompt("/v1/completions", &openai), expected);
        let tokens = coder.tokens("/infill", &gap);
        let marks = spellings
            .iter()
            .filter(|mark| tokens.contains(&coder.id(mark)));
        assert!(marks.count() >= 2, "{expected}");
        // A gap at the end or the beginning of a text.
        let end = coder.prompt("/infill", &json!({"input_prefix": "a cat"}));
        assert_eq!(end.matches("a cat").count(), 1, "{end}");
        let nothing = coder.tokens("/infill", &json!({}));
        assert!((2..=3).contains(&nothing.len()), "{nothing:?}");
    }
}

#[test]
fn a_file_may_name_its_tokens_and_a_text_begins_as_any() {
    let coder = Coder::with(&["@1", "@2", "@3"], 3, |vocab| {
        let id = |text: &str| {
            let at = vocab.tokens.iter().position(|token| token == text);
            at.map(|at| at as TokenId)
        };
        vocab.fim = FimIds {
            prefix: id("@1"),
            suffix: id("@2"),
            middle: id("@3"),
            ..FimIds::default()
        };
        vocab.add_bos = Some(true);
    });
    let gap = json!({"input_prefix": "a cat", "input_suffix": "a dog"});
    assert_eq!(
        coder.prompt("/infill", &gap),
        "<|endoftext|>@1a cat@2a dog@3"
    );
    let by_tokens = json!({"prompt": [300, 301], "suffix": "a dog"});
    let tokens = coder.tokens("/v1/completions", &by_tokens);
    assert_eq!(tokens[..4], [0, coder.id("@1"), 300, 301]);
}

#[test]
fn other_files_come_first() {
    let files = json!([{"filename": "a.rs", "text": "a cat\n"}, {"text": "a dog", "time": 5}]);
    let body = json!({"input_prefix": "x", "input_suffix": "y", "input_extra": files});
    let cases: [(&[&str], &str); 2] = [
        (
            QWEN,
            "<|repo_name|>myproject\n<|file_sep|>a.rs\na cat\n<|file_sep|>tmp\na dog\n<|file_sep|>filename\n\
             <|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>",
        ),
        (
            &["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
            "a cat\na dog\n<fim_prefix>x<fim_suffix>y<fim_middle>",
        ),
    ];
    for (spellings, expected) in cases {
        let coder = Coder::spelled(spellings, 3);
        assert_eq!(coder.prompt("/infill", &body), expected);
        assert_eq!(
            coder.tokens("/infill", &body).last(),
            Some(&coder.id(spellings[2]))
        );
    }
}

/// Whatever kind of token a file makes of its marks.
#[test]
fn what_users_say_is_text() {
    for kind in [1, 3, 4] {
        let coder = Coder::spelled(QWEN, kind);
        let says = |text: &str| format!("{text}{}{}{text}", QWEN[0], QWEN[1]);
        let files = json!([{"filename": QWEN[5], "text": says("c")}]);
        let (before, after) = (says("a"), says("b"));
        let body = json!({"input_prefix": before, "input_suffix": after, "input_extra": files});
        let tokens = coder.tokens("/infill", &body);
        for (mark, expected) in QWEN.iter().zip([1, 1, 1, 0, 1, 2]) {
            let id = coder.id(mark);
            let found = tokens.iter().filter(|&&token| token == id).count();
            assert_eq!(found, expected, "{mark} {kind}");
        }
        let text = coder.tokenizer.decode(&tokens, false);
        assert!(text.contains(&before) && text.contains(&after), "{text}");
        let body = json!({"prompt": before, "suffix": after});
        let tokens = coder.tokens("/v1/completions", &body);
        let first = coder.id(QWEN[0]);
        assert_eq!(tokens.iter().filter(|&&token| token == first).count(), 1);
    }
}

/// What does not fit goes where it is furthest from the gap.
#[test]
fn too_long_a_text_is_cut_off() {
    let coder = Coder::spelled(QWEN, 3);
    let words = |word: &str| format!("{word} ").repeat(2000);
    let files = json!([{"filename": "f", "text": words("file")}]);
    let near = json!({
        "input_prefix": words("before") + "HERE", "input_suffix": format!("THERE{}", words("after")),
        "input_extra": files,
    });
    let tokens = coder.tokens("/infill", &near);
    assert!(tokens.len() < super::CONTEXT, "{}", tokens.len());
    let text = coder.tokenizer.decode(&tokens, false);
    assert!(text.starts_with(QWEN[0]), "no room for other files: {text}");
    assert!(text.contains(&format!("HERE{}THERE", QWEN[1])), "{text}");
    assert!(text.ends_with(QWEN[2]), "{text}");
    let at = tokens
        .iter()
        .position(|&token| token == coder.id(QWEN[1]))
        .unwrap();
    let (before, after) = (at - 1, tokens.len() - at - 2);
    assert!(before > 2 * after && after > 50, "{before} {after}");
    // There is room for an answer, and what is short stays whole.
    let short = json!({"input_prefix": "HERE", "input_suffix": "THERE", "input_extra": files, "n_predict": 100});
    let answer = coder.server.ask("/infill", &short);
    assert!(answer["tokens_evaluated"].as_u64().unwrap() + 100 <= super::CONTEXT as u64);
    let prompt = answer["prompt"].as_str().unwrap();
    let end = format!(
        "{}filename\n{}HERE{}THERE{}",
        QWEN[5], QWEN[0], QWEN[1], QWEN[2]
    );
    assert!(prompt.ends_with(&end), "{prompt}");
    let openai = json!({"prompt": words("before"), "suffix": "THERE", "max_tokens": 5});
    assert_eq!(coder.server.post("/v1/completions", &openai).status, 200);
}

/// The tokens of gaps end an answer, where it fills one in.
#[test]
fn an_answer_ends_at_a_mark() {
    let coder = Coder::spelled(&["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], 3);
    let mark = coder.id("[SUFFIX]").to_string();
    let bias = json!({mark: 100});
    let body =
        json!({"input_prefix": "a", "input_suffix": "b", "n_predict": 5, "logit_bias": bias});
    let answer = coder.server.ask("/infill", &body);
    assert_eq!(
        (&answer["stop_type"], &answer["tokens_predicted"]),
        (&json!("eos"), &json!(1))
    );
    let mut body = body;
    body["ignore_eos"] = true.into();
    assert_eq!(coder.server.ask("/infill", &body)["tokens_predicted"], 5);
    let openai = json!({"prompt": "a", "suffix": "b", "max_tokens": 5, "logit_bias": bias});
    let answer = coder.server.ask("/v1/completions", &openai);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let plain = json!({"prompt": "a", "max_tokens": 5, "logit_bias": bias});
    let answer = coder.server.ask("/v1/completions", &plain);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[test]
fn an_editor_gets_what_it_asks_for() {
    let coder = Coder::spelled(QWEN, 3);
    // As an editor's plug-in asks.
    let body = json!({
        "id_slot": 0, "input_prefix": "fn a() {\n", "input_suffix": "\n}\n", "input_extra": [], "prompt": "    le",
        "n_predict": 12, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": false,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": true, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 600000, "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
        "seed": 5,
    });
    let reply = coder.server.post("/infill", &body);
    let ignored = reply.header("x-ferrum-ignored").unwrap();
    assert_eq!(ignored, "samplers[2], n_indent, t_max_prompt_ms");
    let answer = reply.json();
    let fields: Vec<_> = answer.as_object().unwrap().keys().collect();
    assert_eq!(
        fields,
        ["content", "timings/prompt_n", "truncated", "tokens_cached"]
    );
    let mut stream = body;
    stream["stream"] = true.into();
    let events = coder.server.written_events("/infill", &stream);
    let said = events.iter().map(|event| -> Value {
        serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()
    });
    let said: Vec<_> = said.collect();
    let (_, parts) = said.split_last().unwrap();
    let text: String = parts
        .iter()
        .map(|part| part["content"].as_str().unwrap())
        .collect();
    assert_eq!(answer["content"], text);
    // Only the prompt, to have it in the cache.
    let warm =
        json!({"input_prefix": "a", "n_predict": 0, "samplers": [], "response_fields": [""]});
    assert_eq!(coder.server.ask("/infill", &warm), json!({}));
}

#[test]
fn what_cannot_be_filled_in_is_refused() {
    let server = Running::demo();
    for (path, body, param) in [
        (
            "/v1/completions",
            json!({"prompt": "a", "suffix": "b"}),
            "suffix",
        ),
        ("/infill", json!({"input_prefix": "a"}), "/infill"),
    ] {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400);
        let error = reply.json()["error"].clone();
        assert_eq!(error["param"], param);
        assert_eq!(error["code"], "unsupported_parameter");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("cannot fill in the middle"), "{message}");
    }
    // An empty suffix is none.
    server.ask(
        "/v1/completions",
        &json!({"prompt": "a", "suffix": "", "max_tokens": 1}),
    );
    let coder = Coder::spelled(QWEN, 3);
    for (fields, param) in [
        (json!({"input_prefix": 5}), "input_prefix"),
        (json!({"input_suffix": ["a"]}), "input_suffix"),
        (json!({"prompt": [1]}), "prompt"),
        (json!({"input_extra": {}}), "input_extra"),
        (json!({"input_extra": [{"text": 5}]}), "input_extra[0].text"),
    ] {
        let reply = coder.server.post("/infill", &fields);
        assert_eq!(reply.status, 400, "{fields}");
        assert_eq!(reply.json()["error"]["param"], param);
    }
    for prompt in [json!([]), json!([[]]), json!([[99999]])] {
        let body = json!({"prompt": prompt, "suffix": "b"});
        assert_eq!(
            coder.server.post("/v1/completions", &body).status,
            400,
            "{prompt}"
        );
    }
}
