//! Bodies of requests to all routes: each is answered or refused in the form of the route, and never by a fault of the
//! server.
//!
//! Behind the routes are an engine whose model computes nothing, and a small text encoder.
#![no_main]

use ferrum_client::http::Events;
use ferrum_engine::engine::Clock;
use ferrum_engine::{
    BackendDispatch, BackendKind, BackendOptions, Encoder, Engine, EngineConfig, SamplingParams,
    StepRunner, TaskConfig, TaskEngine,
};
use ferrum_formats::chat_template::ChatTemplate;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::encoder::read_encoder;
use ferrum_models::{
    DecoderSpec, KvLayout, Readback, RowOutput, RunnerConfig, StepBatch, StepOutput, Ticket,
    read_model,
};
use ferrum_server::fuzzing::Routes;
use ferrum_server::{LoadedModel, ServedEncoder, ServedModel, ServerConfig};
use ferrum_types::{Result, TokenId};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::runtime::Runtime;

static DEMO: &[u8] = include_bytes!("../../assets/demo/ferrum-demo.gguf");

const CONTEXT: usize = 512;
const SEQUENCES: usize = 4;

const TEMPLATE: &str = "\
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}";

const FORM: &str = "multipart/form-data; boundary=x";
const JSON: &str = "application/json";

const ROUTES: [(&str, &str); 18] = [
    ("/v1/chat/completions", JSON),
    ("/v1/completions", JSON),
    ("/v1/responses", JSON),
    ("/v1/messages", JSON),
    ("/v1/embeddings", JSON),
    ("/tokenize", JSON),
    ("/detokenize", JSON),
    ("/v1/responses/input_tokens", JSON),
    ("/v1/score", JSON),
    ("/v1/audio/transcriptions", FORM),
    ("/v1/rerank", JSON),
    ("/pooling", JSON),
    ("/apply-template", JSON),
    ("/completion", JSON),
    ("/infill", JSON),
    ("/v1/load_lora_adapter", JSON),
    ("/v1/unload_lora_adapter", JSON),
    ("/v1/messages/count_tokens", JSON),
];

/// Says tokens that follow from the last one, and often that the answer ends.
struct Talker {
    spec: DecoderSpec,
    config: RunnerConfig,
    end: TokenId,
    ready: StepOutput,
    steps: u64,
}

impl StepRunner for Talker {
    fn backend(&self) -> &'static str {
        "talker"
    }

    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn config(&self) -> &RunnerConfig {
        &self.config
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        let vocab = self.spec.vocab_size;
        let hidden = self.spec.hidden_size * batch.hidden_rows.len();
        self.ready.begin(wanted, vocab, hidden);
        self.ready.hidden_mut().fill(0.5);
        for (index, row) in batch.logit_rows.iter().enumerate() {
            let last = batch.tokens[*row as usize] as usize;
            let token = match last % 5 {
                0 => self.end,
                _ => ((last * 31 + 7) % vocab) as TokenId,
            };
            self.ready.set_token(index, Ok(token));
            if let RowOutput::Logits(logits) = self.ready.row(index) {
                logits.fill(0.0);
                logits[token as usize] = 10.0;
            }
        }
        self.steps += 1;
        Ok(Ticket::new(self.steps))
    }

    fn collect(&mut self, _: Ticket, out: &mut StepOutput) -> Result<()> {
        std::mem::swap(&mut self.ready, out);
        Ok(())
    }
}

fn decoder() -> LoadedModel {
    let gguf = || Gguf::from_static(DEMO).expect("the demo model opens");
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf()).expect("it has a tokenizer"));
    let mut spec = read_model(ModelSource::Gguf(gguf()))
        .expect("it can be read")
        .spec;
    spec.context_length = CONTEXT;
    let (vocab_size, hidden_size) = (spec.vocab_size, spec.hidden_size);
    let end = *tokenizer.eos_ids().first().expect("answers end");
    let config = RunnerConfig {
        context: CONTEXT,
        max_seqs: SEQUENCES,
        max_tokens: CONTEXT,
        max_logit_rows: 2 * SEQUENCES,
        kv_tokens: CONTEXT * SEQUENCES,
        kept_states: 0,
        layout: KvLayout::Paged { block_size: 32 },
        profile: false,
    };
    let runner: Box<dyn StepRunner> = Box::new(Talker {
        spec,
        config,
        end,
        ready: StepOutput::default(),
        steps: 0,
    });
    let text = Some(Arc::clone(&tokenizer));
    let engine = Engine::start(runner, text, EngineConfig::default()).expect("it starts");
    let specials: [(&str, &str); 0] = [];
    let template = ChatTemplate::from_source(TEMPLATE, specials).expect("it is a template");
    let model = ServedModel {
        engine: engine.handle(),
        template: Some(template),
        call_format: None,
        open_schemas: false,
        context: CONTEXT,
        vision: None,
        vocab_size,
        stop_tokens: vec![end],
        pooling: Some(Default::default()),
        generates: true,
        dense: Default::default(),
        prompts: Default::default(),
        embedding_size: hidden_size,
        sampling: SamplingParams::default(),
        tokenizer,
    };
    LoadedModel::Decoder(engine, Box::new(model))
}

fn encoder(name: &str) -> LoadedModel {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/encoders");
    let folder = root.join(name);
    let source = ModelSource::open(&folder).expect("the fixture opens");
    let model = read_encoder(source).expect("it can be read");
    let tokenizer = Tokenizer::from_hf_dir(&folder).expect("it has a tokenizer");
    let options = BackendOptions {
        threads: Some(1),
        ..BackendOptions::default()
    };
    let device = BackendDispatch::from_kind(BackendKind::Cpu, options).expect("there is a CPU");
    let encoder = Encoder::load(&device, &model, tokenizer, &mut |_, _| ()).expect("it loads");
    let (tokenizer, pooling) = (Arc::clone(encoder.tokenizer()), encoder.pooling());
    let (embedding_size, labels) = (encoder.dimensions(), encoder.labels());
    let prompts = encoder.prompts().clone();
    let config = TaskConfig {
        max_waiting: 1024,
        stall_after: Duration::from_secs(60),
        clock: Clock::system(),
    };
    let engine = TaskEngine::start(encoder, config).expect("it starts");
    let model = ServedEncoder {
        engine: engine.handle(),
        tokenizer,
        pooling,
        prompts,
        embedding_size,
        labels,
    };
    LoadedModel::Encoder(engine, model)
}

static SERVER: LazyLock<(Runtime, Routes)> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let load = |name: &str| match name {
        "demo" => Ok(decoder()),
        name => Ok(encoder(name)),
    };
    let names = ["demo", "bert", "xlm-roberta-reranker"].map(str::to_owned);
    let routes = Routes::new(names.into(), Arc::new(load), ServerConfig::default());
    (runtime.expect("a runtime"), routes)
});

/// Each event of a stream is JSON, but for the last one of some routes.
fn check_stream(stream: &[u8]) {
    let events = Events::default().push(stream).expect("events");
    assert!(!events.is_empty(), "an answer without events");
    let (last, others) = events.split_last().expect("it is not empty");
    for event in others {
        serde_json::from_str::<Value>(event).expect("an event is JSON");
    }
    if last != "[DONE]" {
        serde_json::from_str::<Value>(last).expect("an event is JSON");
    }
}

// The route, and the body.
fuzz_target!(|data: &[u8]| {
    let [route, body @ ..] = data else {
        return;
    };
    let (path, kind) = ROUTES[usize::from(*route) % ROUTES.len()];
    let (runtime, routes) = &*SERVER;
    let (status, answer) = runtime.block_on(routes.post(path, kind, body));
    // No other request takes places from this one.
    let is_fault = status >= 500 && status != 501;
    assert!(!is_fault, "{path}: {status}");
    if answer.starts_with(b"data:") || answer.starts_with(b"event:") {
        return check_stream(&answer);
    }
    let said: Value = serde_json::from_slice(&answer).expect("an answer is JSON");
    if status != 200 {
        assert!(said["error"]["message"].is_string(), "{path}: {said}");
    }
});
